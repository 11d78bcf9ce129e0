// One tile of query rows against all the keys that it can see: scores, online softmax, output.
#pragma once
#include "int8.hpp"

namespace ADA_NS {

constexpr int64_t KEYS = ADA_KEYS;
constexpr int64_t LDS = KEYS + 16;  // not a power of two: rows of a tile must not fall on the same cache sets
constexpr int64_t LDP = KEYS + 32;
constexpr int64_t ROWS = 24;  // with KEYS a measured optimum: weights and a panel of values stay in the L1 cache
constexpr float LOG2E = 1.44269504088896340736f, LN2 = 0.69314718055994530942f;

struct Row {
  int64_t head, i;       // query head, local query index
  int64_t lo, hi, sink;  // visible keys: [lo, hi) and [0, sink)
};

struct Strip {
  int64_t r0, rows, lo, hi, sink;
  uint64_t panels;  // panels of the present key tile that some row of the strip sees
  bool started;     // the output has been written to
};

// The working memory of one thread, laid out anew for every tile.
// The scales that follow the packed bytes of an int8 tile.
struct Scales {
  float key[ADA_KEYS], value[ADA_KEYS];
  int32_t start[ADA_KEYS];  // -128 times the sum of a key's bytes: queries are shifted by 128 to be unsigned
};

template <class T> struct Work {
  typename T::elem *q, *p, *stage;
  float *s, *o, *m, *l, *alpha;
  float *scale, *shift, *factor;  // int8: of the queries, of the scores and of the weights
  Row *rows;
  Strip *strips;
  uint64_t *panels;  // of each row
};

ADA_INLINE char *take(char *&at, int64_t bytes) {
  char *p = at;
  at += round_up(bytes, 64);
  return p;
}

template <class T> static int64_t layout(Work<T> &w, char *base, int64_t dk, int64_t dv) {
  char *at = base;
  w.q = (typename T::elem *)take(at, ROWS * dk * (int64_t)sizeof(typename T::elem));
  w.s = (float *)take(at, greater(ROWS * LDS, NR * greater(dk, dv)) * 4);
  w.p = T::STEP == 1 ? (typename T::elem *)w.s
                     : (typename T::elem *)take(at, ROWS * LDP * (int64_t)sizeof(typename T::elem));
  w.o = (float *)take(at, ROWS * dv * 4);
  w.m = (float *)take(at, (ROWS + W) * 4);
  w.l = (float *)take(at, (ROWS + W) * 4);
  w.alpha = (float *)take(at, (ROWS + W) * 4);
  w.scale = (float *)take(at, (ROWS + W) * 4);
  w.shift = (float *)take(at, (ROWS + W) * 4);
  w.factor = (float *)take(at, (ROWS + W) * 4);
  w.rows = (Row *)take(at, ROWS * (int64_t)sizeof(Row));
  w.strips = (Strip *)take(at, ROWS * (int64_t)sizeof(Strip));
  w.panels = (uint64_t *)take(at, ROWS * 8);
  w.stage = (typename T::elem *)take(at, NR * greater(dk, dv) * 4);
  return at - base;
}

ADA_INLINE void visible(const ada_args &a, const AdaUnit &u, int64_t i, Row &r) {
  const int64_t p = i + u.offset;
  r.lo = 0;
  r.hi = a.causal ? lesser(u.kn, p + 1) : u.kn;
  r.hi = greater(r.hi, (int64_t)0);
  r.sink = 0;
  if (u.window >= 0) {
    r.sink = lesser(u.sinks, r.hi);
    r.lo = greater((int64_t)0, p - u.window + 1);
    if (!a.causal) r.hi = lesser(r.hi, p + u.window);
    if (r.lo >= r.hi) r.lo = r.hi = 0;
  }
}

// Bits of the panels of tile [t0, t0 + columns) that [lo, hi) touches.
ADA_INLINE uint64_t panel_bits(int64_t lo, int64_t hi, int64_t t0, int64_t columns = KEYS) {
  lo = greater(lo - t0, (int64_t)0);
  hi = lesser(hi - t0, columns);
  if (lo >= hi) return 0;
  int64_t a = lo / NR, b = (hi + NR - 1) / NR;
  uint64_t upto_b = b >= 64 ? ~0ull : (1ull << b) - 1;
  return upto_b & ~((1ull << a) - 1);
}

// Softcap, bias and mask: whatever cannot be said by intervals. Turns raw dot products into natural-log scores.
static void adjust(const ada_args &a, const AdaUnit &u, const Row &row, float *s, int64_t c0, int64_t c1, int64_t t0) {
  const float scale = (float)a.scaling;
  if (a.softcap > 0) {
    const float cap = (float)a.softcap, f = scale / cap;
    for (int64_t c = c0; c < c1; ++c) s[c] = cap * tanhf(s[c] * f);
  } else {
    for (int64_t c = c0; c < c1; ++c) s[c] *= scale;
  }
  const int64_t end = lesser(c1, u.kn - t0), key = u.k0 + t0;
  if (a.bias) {
    int64_t at = u.row * a.bs[0] + row.head * a.bs[1] + (u.q0 + row.i) * a.bs[2] + key * a.bs[3];
    if (a.bias_dtype == ADA_F32 && a.bs[3] == 1) {
      const float *b = (const float *)a.bias + at;
      for (int64_t c = c0; c < end; ++c) s[c] += b[c];
    } else {
      for (int64_t c = c0; c < end; ++c) s[c] += load_any(a.bias, a.bias_dtype, at + c * a.bs[3]);
    }
  }
  if (a.mask) {
    const uint8_t *b = a.mask + u.row * a.ms[0] + row.head * a.ms[1] + (u.q0 + row.i) * a.ms[2] + key * a.ms[3];
    for (int64_t c = c0; c < end; ++c)
      if (!b[c * a.ms[3]]) s[c] = -INFINITY;
  }
}

// Columns of [c0, c1) outside the row's visible keys become -inf.
static void hide(const Row &row, float *s, int64_t c0, int64_t c1, int64_t t0) {
  const int64_t lo = row.lo - t0, hi = row.hi - t0, sink = row.sink - t0;
  if (sink <= c0 || sink >= c1) {
    if (sink >= c1) return;
    const int64_t a = lesser(greater(lo, c0), c1), b = greater(lesser(hi, c1), a);
    for (int64_t c = c0; c < a; ++c) s[c] = -INFINITY;
    for (int64_t c = b; c < c1; ++c) s[c] = -INFINITY;
    return;
  }
  for (int64_t c = sink; c < c1; ++c)
    if (c < lo || c >= hi) s[c] = -INFINITY;
}

ADA_INLINE void store_p(F32, float *p, vf x, vf y) {
  store(p, x);
  store(p + W, y);
}
#ifdef ADA_HAS_BF16
ADA_INLINE void store_p(BF16, uint16_t *p, vf x, vf y) {
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x));
}
#endif

// The online softmax of one row over the panels in `panels`; c = factor from s to log2 scores.
template <class T>
ADA_INLINE void softmax_row(float *s, typename T::elem *p, uint64_t panels, float c, float &m, float &l, float &alpha) {
  int64_t c0, c1;
  vf top0 = splat(-INFINITY), top1 = top0;
  for (uint64_t bits = panels; next_run(bits, c0, c1);)
    for (int64_t i = c0; i < c1; i += 2 * W) {
      top0 = vmax(top0, load(s + i));
      top1 = vmax(top1, load(s + i + W));
    }
  float top = hmax(vmax(top0, top1)) * c;  // c >= 0
  float next = greater(m, top);
  if (!(next > -INFINITY)) {
    alpha = 1;
    for (uint64_t bits = panels; next_run(bits, c0, c1);)
      memset(p + c0, 0, (size_t)(c1 - c0) * sizeof(typename T::elem));
    return;
  }
  alpha = m > -INFINITY ? exp2f(m - next) : 0.0f;
  vf sum0 = vf{}, sum1 = vf{};
  const vf cc = splat(c), mm = splat(next);
  for (uint64_t bits = panels; next_run(bits, c0, c1);)
    for (int64_t i = c0; i < c1; i += 2 * W) {
      vf x = exp2_neg<T::EXP_DEGREE>(load(s + i) * cc - mm);
      vf y = exp2_neg<T::EXP_DEGREE>(load(s + i + W) * cc - mm);
      sum0 += x;
      sum1 += y;
      store_p(T{}, p + i, x, y);
    }
  l = l * alpha + hsum(sum0 + sum1);
  m = next;
}

ADA_INLINE vf largest(const float *s, uint64_t panels) {
  int64_t c0, c1;
  vf x = splat(-INFINITY), y = x;
  for (uint64_t bits = panels; next_run(bits, c0, c1);)
    for (int64_t i = c0; i < c1; i += 2 * W) {
      x = vmax(x, load(s + i));
      y = vmax(y, load(s + i + W));
    }
  return vmax(x, y);
}

// Weights of 2 * W columns from i on, and what they add to the row's sum (and, int8, to its peak).
template <class T>
ADA_INLINE void soften(float *s, typename T::elem *p, int64_t i, vf cc, vf mm, const float *value_scale, vf &sum0,
                       vf &sum1, vf &top) {
  vf x = exp2_neg<T::EXP_DEGREE>(load(s + i) * cc - mm);
  vf y = exp2_neg<T::EXP_DEGREE>(load(s + i + W) * cc - mm);
  sum0 += x;
  sum1 += y;
  if constexpr (T::STEP == 4) {
    x *= load(value_scale + i);
    y *= load(value_scale + i + W);
    top = vmax(top, vmax(x, y));
    store(s + i, x);
    store(s + i + W, y);
  } else {
    store_p(T{}, p + i, x, y);
  }
}

// The same for W rows at a time, whose reductions then share one tree and one exponential. Rows from `n` on are absent;
// `m`, `l` and `alpha` have room for W. Value scales and `factor` belong to int8 alone.
template <class T>
ADA_INLINE void softmax_rows(float *s, typename T::elem *p, int64_t ldp, const uint64_t *panels, int64_t n, float c,
                             const float *value_scale, float *m, float *l, float *alpha, float *factor) {
  (void)value_scale, (void)factor;
  // While a row is exponentiated, the maximum of the row after next is found: comparing and multiplying use different
  // units, and a row comes into the cache once.
  vf part[W], peak[W];
  float next[W + 2], start[W + 2];
  const vf before = load(m), cc = splat(c);
  const auto settle = [&](int64_t r, vf top) {
    next[r] = greater(m[r], hmax(top) * c);  // c >= 0
    start[r] = next[r] > -INFINITY ? next[r] : 0.0f;  // a row that has seen nothing yet
  };
  for (int64_t r = 0; r < 2 && r < n; ++r) settle(r, largest(s + r * LDS, panels[r]));
  for (int64_t r = 0; r < W; ++r) {
    part[r] = peak[r] = vf{};
    if (r >= n) {
      next[r] = -INFINITY, start[r] = 0;
      continue;
    }
    int64_t c0, c1;
    vf x0 = vf{}, y0 = vf{}, top = vf{}, top0 = splat(-INFINITY), top1 = top0;
    const vf mm = splat(start[r]);
    float *sr = s + r * LDS;
    const bool ahead = r + 2 < n && r + 2 < W;
    if (ahead && panels[r + 2] == panels[r]) {
      const float *sn = sr + 2 * LDS;
      for (uint64_t bits = panels[r]; next_run(bits, c0, c1);)
        for (int64_t i = c0; i < c1; i += 2 * W) {
          top0 = vmax(top0, load(sn + i));
          top1 = vmax(top1, load(sn + i + W));
          soften<T>(sr, p + r * ldp, i, cc, mm, value_scale, x0, y0, top);
        }
      top0 = vmax(top0, top1);
    } else {
      for (uint64_t bits = panels[r]; next_run(bits, c0, c1);)
        for (int64_t i = c0; i < c1; i += 2 * W) soften<T>(sr, p + r * ldp, i, cc, mm, value_scale, x0, y0, top);
      if (ahead) top0 = largest(sr + 2 * LDS, panels[r + 2]);
    }
    if (ahead) settle(r + 2, top0);
    part[r] = x0 + y0;
    peak[r] = top;
  }
  const vf f = exp2_neg<5>(before - load(start));
  store(m, load(next));
  store(alpha, f);
  store(l, load(l) * f + lanes_sum(part));
#ifdef ADA_HAS_BF16
  if constexpr (T::STEP == 4) {
    const vf tops = lanes_max(peak);
    store(factor, tops * splat(1.0f / 255.0f));
    for (int64_t r = 0; r < n; ++r) {
      int64_t c0, c1;
      const vf inverse = splat(tops[r] > 0 ? 255.0f / tops[r] : 0.0f);
      for (uint64_t bits = panels[r]; next_run(bits, c0, c1);)
        for (int64_t i = c0; i < c1; i += W)
          _mm_storeu_si128((__m128i *)(p + r * ldp + i),
                           _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32((__m512)(load(s + r * LDS + i) * inverse))));
    }
  }
#endif
}

static void finish_row(const ada_args &a, const AdaUnit &u, const Row &row, const float *o, float m, float l,
                       int64_t dv) {
  float inv = 0, lse = -INFINITY;
  if (!(l > 0) && a.sink_logits) lse = a.sink_logits[row.head];  // the sink alone carries the row, without a value
  if (l > 0) {
    if (a.sink_logits) {
      const float sink = a.sink_logits[row.head] * LOG2E, next = greater(m, sink);
      const float f = exp2f(m - next);
      inv = f / (l * f + exp2f(sink - next));
      if (a.lse) lse = LN2 * next + logf(l * f + exp2f(sink - next));
    } else {
      inv = 1.0f / l;
      if (a.lse) lse = LN2 * m + logf(l);
    }
  }
  const int64_t i = u.q0 + row.i;
  if (a.lse) a.lse[(u.row * a.q_heads + row.head) * a.q_len + i] = lse;
  if (!a.out) return;
  const int64_t at = u.row * a.os[0] + row.head * a.os[1] + i * a.os[2];
  if (inv == 0) {
    for (int64_t d = 0; d < dv; ++d) store_any(a.out, a.q_dtype, at + d * a.os[3], 0.0f);
  } else if (a.q_dtype == ADA_F32 && a.os[3] == 1) {
    float *y = (float *)a.out + at;
    for (int64_t d = 0; d < dv; ++d) y[d] = o[d] * inv;
  } else if (a.q_dtype == ADA_BF16 && a.os[3] == 1) {
    uint16_t *y = (uint16_t *)a.out + at;
    int64_t d = 0;
#ifdef ADA_HAS_BF16
    for (; d + W <= dv; d += W)
      _mm256_storeu_si256((__m256i *)(y + d), (__m256i)_mm512_cvtneps_pbh((__m512)(load(o + d) * splat(inv))));
#endif
    for (; d < dv; ++d) y[d] = to_bf16(o[d] * inv);
  } else {
    for (int64_t d = 0; d < dv; ++d) store_any(a.out, a.q_dtype, at + d * a.os[3], o[d] * inv);
  }
}

// Which query rows task `task` of a unit covers. Late rows come first: under a causal mask they have the most keys.
static int64_t task_rows(const ada_args &a, const AdaShape &sh, const AdaUnit &u, int64_t task, Row *rows,
                         int64_t &q_block) {
  const int64_t groups = (sh.group + u.heads_per - 1) / u.heads_per;
  const int64_t g0 = task % groups * u.heads_per, tile = u.row_tiles - 1 - task / groups;
  const int64_t heads = lesser(u.heads_per, sh.group - g0);
  int64_t i0 = tile * sh.rows, i1 = lesser(u.qn, i0 + sh.rows);
  q_block = 0;
  if (a.block_ptr) {  // a tile must not reach over the edge of a query block
    const int64_t per = (a.block_q + sh.rows - 1) / sh.rows, size = (a.block_q + per - 1) / per;
    q_block = tile / per;
    const int64_t end = lesser((q_block + 1) * a.block_q, u.qn);
    i0 = q_block * a.block_q + tile % per * size;
    i1 = lesser(i0 + size, end);
  }
  int64_t n = 0;
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = i0; i < i1; ++i, ++n) {
      rows[n].head = u.head * sh.group + g0 + h;
      rows[n].i = i;
      visible(a, u, i, rows[n]);
    }
  return n;
}

#ifdef ADA_HAS_BF16
// A query row in bytes, its scale, and its product with the mean that the keys are rid of.
static void round_query(const ada_args &a, const AdaShape &sh, const AdaUnit &u, Work<I8> &w, int64_t r) {
  float *x = (float *)w.stage;
  convert_row<F32>(x, a.q, a.q_dtype, u.row * a.qs[0] + w.rows[r].head * a.qs[1] + (u.q0 + w.rows[r].i) * a.qs[2],
                   a.qs[3], a.dim, a.dim);
  w.shift[r] = 0;
  if (a.key_mean)
    for (int64_t d = 0; d < a.dim; ++d) w.shift[r] += x[d] * a.key_mean[u.head * a.dim + d];
  w.scale[r] = round_row(w.q + r * sh.dk, x, a.dim, sh.dk, 128, nullptr);
}

static void pack_bytes(const ada_args &a, const AdaShape &sh, const AdaUnit &u, int64_t t, char *scratch) {
  Work<I8> w;
  layout<I8>(w, scratch, sh.dk, sh.dv);
  char *base = u.pack + t * u.tile_bytes;
  uint8_t *kp = (uint8_t *)base, *vp = (uint8_t *)base + u.k_bytes;
  Scales &sc = *(Scales *)(base + u.tile_bytes - (int64_t)sizeof(Scales));
  const int64_t key = u.k0 + t * KEYS, n = lesser(KEYS, u.kn - t * KEYS);
  float *x = w.s;  // free while packing, and longer than any head that the layout admits
  uint8_t *stage = (uint8_t *)w.stage;
  for (int64_t j = 0; j < round_up(n, NR); ++j) {
    uint8_t *row = stage + j % NR * sh.dk;
    int32_t sum = 0;
    sc.key[j] = sc.value[j] = 0;
    if (j < n) {
      convert_row<F32>(x, a.k, a.kv_dtype, u.row * a.ks[0] + u.head * a.ks[1] + (key + j) * a.ks[2], a.ks[3], a.dim,
                       a.dim);
      if (a.key_mean)
        for (int64_t d = 0; d < a.dim; ++d) x[d] -= a.key_mean[u.head * a.dim + d];
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
      } else {
        memset(row, 0, (size_t)sh.dv);
      }
    }
    for (int64_t d = 0; d < sh.dv; d += NR)
      for (int64_t i = 0; i < NR; ++i)
        for (int64_t k = 0; k < 4; ++k) vp[d * u.pitch + j * NR + i * 4 + k] = stage[k * sh.dv + d + i];
  }
}
#endif

template <class T>
static void forward_tile(const ada_args &a, const AdaShape &sh, const AdaUnit &u, int64_t task, char *scratch) {
  typedef typename T::elem elem;
  constexpr int64_t ldp = T::STEP == 1 ? LDS : LDP;
  Work<T> w;
  layout<T>(w, scratch, sh.dk, sh.dv);
  int64_t q_block;
  const int64_t n = task_rows(a, sh, u, task, w.rows, q_block);
  const bool special = a.softcap > 0 || a.bias || a.mask;
  const float c = special ? LOG2E : (float)(a.scaling * 1.4426950408889634);
  int64_t strips = 0;
  for (int64_t r0 = 0; r0 < n; r0 += MR, ++strips) {
    Strip &st = w.strips[strips];
    st = {r0, lesser((int64_t)MR, n - r0), INT64_MAX, 0, 0, 0, false};
    for (int64_t r = r0; r < r0 + st.rows; ++r) {
      if (w.rows[r].lo < w.rows[r].hi) {
        st.lo = lesser(st.lo, w.rows[r].lo);
        st.hi = greater(st.hi, w.rows[r].hi);
      }
      st.sink = greater(st.sink, w.rows[r].sink);
    }
  }
  for (int64_t r = 0; r < ROWS + W; ++r) {
    w.m[r] = -INFINITY;
    w.l[r] = 0;
  }
  for (int64_t r = 0; r < n; ++r) {
#ifdef ADA_HAS_BF16
    if constexpr (T::STEP == 4) {
      round_query(a, sh, u, w, r);
      continue;
    } else
#endif
    convert_row<T>(w.q + r * sh.dk, a.q, a.q_dtype,
                   u.row * a.qs[0] + w.rows[r].head * a.qs[1] + (u.q0 + w.rows[r].i) * a.qs[2], a.qs[3], a.dim, sh.dk);
  }
  if (a.out && a.os[3] == 1)
    for (int64_t r = 0; r < n; ++r) {
      const int64_t size = a.q_dtype == ADA_F32 ? 4 : 2;
      const char *o = (const char *)a.out + (u.row * a.os[0] + w.rows[r].head * a.os[1] + (u.q0 + w.rows[r].i) * a.os[2]) * size;
      for (int64_t d = 0; d < a.dim_v * size; d += 64) __builtin_prefetch(o + d, 1);
    }
  const int64_t *block = nullptr, *block_end = nullptr;
  if (a.block_ptr) {
    const int64_t at = u.head * (a.block_tiles / a.kv_heads) + q_block;
    block = a.block_index + a.block_ptr[at];
    block_end = a.block_index + a.block_ptr[at + 1];
  }
  for (int64_t t = 0; t < u.tiles; ++t) {
    const int64_t t0 = t * KEYS;
    uint64_t listed = ~0ull, any = 0;
    if (a.block_ptr) {
      listed = 0;
      for (; block < block_end && *block * ADA_BLOCK < t0 + KEYS; ++block)
        listed |= panel_bits(*block * ADA_BLOCK, (*block + 1) * ADA_BLOCK, t0);
    }
    for (int64_t i = 0; i < strips; ++i) {
      Strip &st = w.strips[i];
      st.panels = listed & (panel_bits(st.lo, st.hi, t0) | panel_bits(0, st.sink, t0));
      any |= st.panels;
    }
    if (!any) continue;
    const elem *kp = (const elem *)(u.pack + t * u.tile_bytes);
    const elem *vp = (const elem *)(u.pack + t * u.tile_bytes + u.k_bytes);
    const Scales *sc = (const Scales *)(u.pack + (t + 1) * u.tile_bytes - (int64_t)sizeof(Scales));  // int8 alone
    (void)sc;
    for (int64_t j = 0; j < KEYS / NR; ++j) {
      if (!(any >> j & 1)) continue;
      for (int64_t i = 0; i < strips; ++i) {
        const Strip &st = w.strips[i];
        if (!(st.panels >> j & 1)) continue;
#ifdef ADA_HAS_BF16
        if constexpr (T::STEP == 4)
          strip_scores(st.rows, w.q + st.r0 * sh.dk, sh.dk, kp + j * NR * sh.dk, sh.dk / 4, w.s + st.r0 * LDS + j * NR,
                       LDS, sc->start + j * NR, sc->key + j * NR, w.scale + st.r0, w.shift + st.r0);
        else
#endif
          strip<T, ZERO>(st.rows, w.q + st.r0 * sh.dk, sh.dk, kp + j * NR * sh.dk, sh.dk / T::STEP,
                         w.s + st.r0 * LDS + j * NR, LDS, nullptr);
      }
    }
    for (int64_t r = 0; r < n; ++r) {
      const Row &row = w.rows[r];
      float *s = w.s + r * LDS;
      w.panels[r] = w.strips[r / MR].panels;
      int64_t c0, c1;
      for (uint64_t bits = w.panels[r]; next_run(bits, c0, c1);) {
        if (special) adjust(a, u, row, s, c0, c1, t0);
        if (t0 + c0 < row.lo || t0 + c1 > row.hi) hide(row, s, c0, c1, t0);
      }
    }
    for (int64_t r = 0; r < n; r += W)
      softmax_rows<T>(w.s + r * LDS, w.p + r * ldp, ldp, w.panels + r, n - r, c, sc->value, w.m + r, w.l + r,
                      w.alpha + r, w.factor + r);
    if (!a.out) continue;
    for (int64_t d = 0; d < sh.dv; d += NR)
      for (int64_t i = 0; i < strips; ++i) {
        const Strip &st = w.strips[i];
        int64_t c0, c1;
        bool first = true;
        for (uint64_t bits = st.panels; next_run(bits, c0, c1); first = false) {
          const elem *p = w.p + st.r0 * ldp + c0, *v = vp + d * u.pitch + c0 * NR;
          float *o = w.o + st.r0 * sh.dv + d;
          // no row of the strip sees a key from here on, so its weights are 0
          const int64_t stop = lesser(c1, greater(st.hi, st.sink) - t0);
          const int64_t steps = (stop - c0 + T::STEP - 1) / T::STEP;
#ifdef ADA_HAS_BF16
          if constexpr (T::STEP == 4) {
            const float *al = w.alpha + st.r0, *f = w.factor + st.r0;
            if (!first) strip_values<ADD>(st.rows, p, ldp, v, steps, o, sh.dv, nullptr, f);
            else if (st.started) strip_values<SCALE>(st.rows, p, ldp, v, steps, o, sh.dv, al, f);
            else strip_values<ZERO>(st.rows, p, ldp, v, steps, o, sh.dv, nullptr, f);
            continue;
          } else
#endif
          if (!first) strip<T, ADD>(st.rows, p, ldp, v, steps, o, sh.dv, nullptr);
          else if (st.started) strip<T, SCALE>(st.rows, p, ldp, v, steps, o, sh.dv, w.alpha + st.r0);
          else strip<T, ZERO>(st.rows, p, ldp, v, steps, o, sh.dv, nullptr);
        }
      }
    for (int64_t i = 0; i < strips; ++i) w.strips[i].started |= w.strips[i].panels != 0;
  }
  for (int64_t r = 0; r < n; ++r)
    finish_row(a, u, w.rows[r], w.o + r * sh.dv, w.m[r], w.l[r], a.dim_v);
}

// Rows of int8 times the scale of each row, as float32.
static void dequantise(float *to, const void *src, int64_t at, int64_t row_stride, int64_t stride, const float *scale,
                       int64_t scale_stride, int64_t rows, int64_t n) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < n; ++i)
      to[r * n + i] = (float)((const int8_t *)src)[at + r * row_stride + i * stride] * scale[r * scale_stride];
}

template <class T>
static void pack_tile(const ada_args &a, const AdaShape &sh, const AdaUnit &u, int64_t t, char *scratch) {
  typedef typename T::elem elem;
  Work<T> w;
  layout<T>(w, scratch, sh.dk, sh.dv);
  elem *kp = (elem *)(u.pack + t * u.tile_bytes), *vp = (elem *)(u.pack + t * u.tile_bytes + u.k_bytes);
  const int64_t key = u.k0 + t * KEYS, n = lesser(KEYS, u.kn - t * KEYS);
  const int64_t kb = u.row * a.ks[0] + u.head * a.ks[1] + key * a.ks[2];
  const int64_t vb = u.row * a.vs[0] + u.head * a.vs[1] + key * a.vs[2];
  for (int64_t j = 0; j < round_up(n, NR); j += NR) {
    if (a.kv_dtype == ADA_I8) {
      const float *f = a.k_scale + u.row * a.kss[0] + u.head * a.kss[1] + (key + j) * a.kss[2];
      dequantise(w.s, a.k, kb + j * a.ks[2], a.ks[2], a.ks[3], f, a.kss[2], lesser((int64_t)NR, n - j), a.dim);
      pack_transposed<T>(kp + j * sh.dk, w.s, ADA_F32, 0, a.dim, 1, n - j, a.dim, sh.dk, w.stage);
    } else {
      pack_transposed<T>(kp + j * sh.dk, a.k, a.kv_dtype, kb + j * a.ks[2], a.ks[2], a.ks[3], n - j, a.dim, sh.dk,
                         w.stage);
    }
  }
  if (!a.out) return;
  for (int64_t j = 0; a.kv_dtype == ADA_I8 && j < n; j += NR) {
    const float *f = a.v_scale + u.row * a.vss[0] + u.head * a.vss[1] + (key + j) * a.vss[2];
    const int64_t rows = lesser((int64_t)NR, n - j);
    dequantise(w.s, a.v, vb + j * a.vs[2], a.vs[2], a.vs[3], f, a.vss[2], rows, a.dim_v);
    pack_rows<T>(vp + j * NR, u.pitch, w.s, ADA_F32, 0, a.dim_v, 1, rows, a.dim_v, sh.dv, w.stage);
  }
  if (a.kv_dtype != ADA_I8)
    pack_rows<T>(vp, u.pitch, a.v, a.kv_dtype, vb, a.vs[2], a.vs[3], n, a.dim_v, sh.dv, w.stage);
  const int64_t done = round_up(n, T::STEP), padded = round_up(n, NR);  // a run of panels may end past the last key
  for (int64_t d = 0; d < sh.dv; d += NR)
    memset(vp + d * u.pitch + done * NR, 0, (size_t)((padded - done) * NR) * sizeof(elem));
}

template <class T> static void shape_of(const ada_args &a, AdaShape &sh) {
  sh.group = a.q_heads / a.kv_heads;
  sh.dk = round_up(a.dim, T::STEP);
  sh.dv = round_up(a.dim_v, NR);
  sh.k_size = sh.dk * (int64_t)sizeof(typename T::elem);
  sh.v_size = sh.dv * (int64_t)sizeof(typename T::elem);
  sh.extra = T::STEP == 4 ? (int64_t)sizeof(Scales) : 0;
  sh.rows = ROWS;
  Work<T> w;
  sh.scratch = layout<T>(w, nullptr, sh.dk, sh.dv);
}

}  // namespace ADA_NS
