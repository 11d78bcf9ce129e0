// What int8 products need around them: packing, rounding of queries, and weights that come out of the softmax as bytes.
#pragma once
#include "int8.hpp"
#include "softmax.hpp"

namespace ADA_NS {

#ifdef ADA_HAS_BF16
// The scales that follow the packed bytes of a tile.
struct Scales {
  float key[ADA_KEYS], value[ADA_KEYS];
  int32_t start[ADA_KEYS];    // -128 times the sum of a key's bytes: queries are shifted by 128 to be unsigned
  float log_value[ADA_KEYS];  // log2 of the value scales, within bounds
};

// A query row in bytes, its scale, and its product with the mean that the keys are rid of.
static void round_query(const ada_args &a, const AdaShape &sh, const AdaUnit &u, Work<I8> &w, int64_t r) {
  float *x = (float *)w.stage;
  convert_row<F32>(x, a.q, a.q_dtype, u.row * a.qs[0] + w.rows[r].head * a.qs[1] + (u.q0 + w.rows[r].i) * a.qs[2],
                   a.qs[3], a.dim, a.dim);
  w.shift[r] = 0;
  if (const float *mean = mean_of(a, u))
    for (int64_t d = 0; d < a.dim; ++d) w.shift[r] += x[d] * mean[d];
  w.scale[r] = round_row(w.q + r * sh.dk, x, a.dim, sh.dk, 128, nullptr);
}

// log2(x) to 1e-4 (a least maximum fit), between -60 and 60; -60 for 0.
ADA_INLINE vf log2_within(vf x) {
  const vf e = (vf)_mm512_getexp_ps((__m512)x);
  const vf f = (vf)_mm512_getmant_ps((__m512)x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src) - splat(1.0f);
  const vf p = f * (splat(1.43901629f) + f * (splat(-0.6799581f) + f * (splat(0.32562679f) + f * splat(-0.08478822f))));
  return (vf)_mm512_min_ps((__m512)vmax(e + p, splat(-60.0f)), (__m512)splat(60.0f));
}

static void pack_bytes(const ada_args &a, const AdaShape &sh, const AdaUnit &u, int64_t t, char *scratch) {
  Work<I8> w;
  layout<I8>(w, scratch, sh.dk, sh.dv);
  char *base = u.pack + t * u.tile_bytes;
  uint8_t *kp = (uint8_t *)base, *vp = (uint8_t *)base + u.k_bytes;
  Scales &sc = *(Scales *)(base + u.tile_bytes - (int64_t)sizeof(Scales));
  const int64_t key = u.k0 + t * KEYS, n = lesser(KEYS, u.kn - t * KEYS);
  const float *mean = mean_of(a, u);
  float *x = w.s;  // free while packing, and longer than any head that the layout admits
  uint8_t *stage = (uint8_t *)w.stage;
  for (int64_t j = 0; j < round_up(n, NR); ++j) {
    uint8_t *row = stage + j % NR * sh.dk;
    int32_t sum = 0;
    sc.key[j] = sc.value[j] = 0;
    if (j < n) {
      convert_row<F32>(x, a.k, a.kv_dtype, u.row * a.ks[0] + u.head * a.ks[1] + (key + j) * a.ks[2], a.ks[3], a.dim,
                       a.dim);
      if (mean)
        for (int64_t d = 0; d < a.dim; ++d) x[d] -= mean[d];
      sc.key[j] = round_row(row, x, a.dim, sh.dk, 0, &sum);
    } else {
      memset(row, 0, (size_t)sh.dk);
    }
    sc.start[j] = -128 * sum;
    if (j % NR == NR - 1)
      transpose_panel((const uint32_t *)stage, sh.dk / 4, sh.dk / 4, (uint32_t *)(kp + (j + 1 - NR) * sh.dk));
  }
  if (!a.out) return;
  for (int64_t j = 0; j < round_up(n, NR); j += 4) {
    for (int64_t i = 0; i < 4; ++i) {
      uint8_t *row = stage + i * sh.dv;
      if (j + i < n) {
        convert_row<F32>(x, a.v, a.kv_dtype, u.row * a.vs[0] + u.head * a.vs[1] + (key + j + i) * a.vs[2], a.vs[3],
                         a.dim_v, a.dim_v);
        sc.value[j + i] = round_row(row, x, a.dim_v, sh.dv, 0, nullptr);
        if (sc.value[j + i] != sc.value[j + i]) {  // bytes cannot say NaN: the scores of the key do
          sc.key[j + i] = sc.value[j + i];
          sc.value[j + i] = 0;
        }
      } else {
        memset(row, 0, (size_t)sh.dv);
      }
    }
    for (int64_t d = 0; d < sh.dv; d += 16) {  // 4 keys x 16 channels: bytes of a channel become neighbours
      const auto row = [&](int64_t k) { return _mm_loadu_si128((const __m128i *)(stage + k * sh.dv + d)); };
      const __m128i ab = _mm_unpacklo_epi8(row(0), row(1)), cd = _mm_unpacklo_epi8(row(2), row(3));
      const __m128i ef = _mm_unpackhi_epi8(row(0), row(1)), gh = _mm_unpackhi_epi8(row(2), row(3));
      __m128i *at = (__m128i *)(vp + d / NR * NR * u.pitch + j * NR + d % NR * 4);
      _mm_storeu_si128(at, _mm_unpacklo_epi16(ab, cd));
      _mm_storeu_si128(at + 1, _mm_unpackhi_epi16(ab, cd));
      _mm_storeu_si128(at + 2, _mm_unpacklo_epi16(ef, gh));
      _mm_storeu_si128(at + 3, _mm_unpackhi_epi16(ef, gh));
    }
  }
  for (int64_t j = 0; j < round_up(n, NR); j += W) store(sc.log_value + j, log2_within(load(sc.value + j)));
}

// Calls f(group, first column, last column) for the groups in the runs of `panels`; whole ones get constant extents.
template <class F> ADA_INLINE void each_group(uint64_t panels, F f) {
  int64_t c0, c1;
  while (next_run(panels, c0, c1))
    for (int64_t g = c0 / GROUP; g * GROUP < c1; ++g) {
      const int64_t from = greater(c0, g * GROUP), to = lesser(c1, (g + 1) * GROUP);
      if (to - from == GROUP) f(g, from, from + GROUP);
      else f(g, from, to);
    }
}

// Four vectors of small integers as bytes, in order.
ADA_INLINE __m512i to_bytes(vf a, vf b, vf c, vf d) {
  const __m512i ab = _mm512_packus_epi32(_mm512_cvtps_epi32((__m512)a), _mm512_cvtps_epi32((__m512)b));
  const __m512i cd = _mm512_packus_epi32(_mm512_cvtps_epi32((__m512)c), _mm512_cvtps_epi32((__m512)d));
  const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  return _mm512_permutexvar_epi32(order, _mm512_packus_epi16(ab, cd));
}

// The online softmax of the first W rows of n, with weights times value scales as bytes. `factor` [rows][W] gets the unit of each
// group: its largest product of a weight and a value scale over 255. A row looks at keys that it sees and at no others.
// The maxima are those of these products, too: `m` only has to keep the weights within the range of a float.
ADA_INLINE void softmax_bytes(const float *s, uint8_t *p, int64_t ldp, const uint64_t *panels, int64_t n, float c,
                              const Scales &sc, float *m, float *l, float *alpha, float *factor) {
  const vf before = load(m), cc = splat(c);  // c >= 0
  vf tops[W], part[W];
  float start[W], next[W];
  for (int64_t r = 0; r < W; ++r) {
    part[r] = vf{};
    start[r] = 0, next[r] = -INFINITY;
    if (r >= n) continue;
    const float *sr = s + r * LDS;
    vf top[W];
    for (vf &x : top) x = splat(-INFINITY);
    each_group(panels[r], [&](int64_t g, int64_t c0, int64_t c1) {
      vf x = splat(-INFINITY), y = x;
#pragma GCC unroll 2
      for (int64_t i = c0; i < c1; i += 2 * W) {
        x = vmax(x, load(sr + i) * cc + load(sc.log_value + i));
        y = vmax(y, load(sr + i + W) * cc + load(sc.log_value + i + W));
      }
      top[g] = vmax(x, y);
    });
    tops[r] = lanes_max(top);
    next[r] = greater(m[r], hmax(tops[r]));
    if (next[r] > -INFINITY) start[r] = next[r];
  }
  for (int64_t r = 0; r < lesser(n, (int64_t)W); ++r) {
    const float *sr = s + r * LDS;
    uint8_t *pr = p + r * ldp;
    const vf mm = splat(start[r]), unit = exp2_neg<5>(tops[r] - mm) * splat(1.0f / 255.0f);
    store(factor + r * W, unit);
    float inverse[W];
    store(inverse, unit > vf{} ? splat(1.0f) / unit : vf{});
    vf x0 = vf{}, y0 = vf{};
    each_group(panels[r], [&](int64_t g, int64_t c0, int64_t c1) {
      const vf f = splat(inverse[g]);
      if (c1 - c0 == GROUP) {
        vf x[GROUP / W];
#pragma GCC unroll 4
        for (int i = 0; i < GROUP / W; ++i) {
          x[i] = exp2_neg<I8::EXP_DEGREE>(load(sr + c0 + i * W) * cc - mm);
          (i % 2 ? y0 : x0) += x[i];
          x[i] *= load(sc.value + c0 + i * W) * f;
        }
        _mm512_storeu_si512(pr + c0, to_bytes(x[0], x[1], x[2], x[3]));
        return;
      }
      for (int64_t i = c0; i < c1; i += W) {
        const vf x = exp2_neg<I8::EXP_DEGREE>(load(sr + i) * cc - mm);
        x0 += x;
        const __m512 y = (__m512)(x * load(sc.value + i) * f);
        _mm_storeu_si128((__m128i *)(pr + i), _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(y)));
      }
    });
    part[r] = x0 + y0;
  }
  const vf f = exp2_neg<5>(before - load(start));
  store(m, load(next));
  store(alpha, f);
  store(l, load(l) * f + lanes_sum(part));
}
#endif

}  // namespace ADA_NS
