// From dot products to weights (softcap, bias, mask, online softmax) and from sums to the output.
#pragma once
#include "rows.hpp"

namespace ADA_NS {

// Softcap, bias and mask: whatever cannot be said by intervals. Turns raw dot products into natural-log scores.
static void adjust(const ada_args &a, const AdaUnit &u, const Row &row, float *s, int64_t c0, int64_t c1, int64_t t0) {
  const float scale = (float)a.scaling;
  if (a.softcap > 0) {
    const float cap = (float)a.softcap, f = scale / cap;
    for_vectors(s + c0, c1 - c0, [&](vf x) { return splat(cap) * vtanh(x * splat(f)); });
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
    if (a.ms[3] == 1)
      for (int64_t c = c0; c < end; ++c) s[c] = b[c] ? s[c] : -INFINITY;
    else
      for (int64_t c = c0; c < end; ++c) s[c] = b[c * a.ms[3]] ? s[c] : -INFINITY;
  }
}

// The largest bias that a row sees, where that is so large that sums with it, once scaled, would have no digits left; else 0.
static float far_bias(const ada_args &a, const AdaUnit &u, const Row &row) {
  const int64_t at = u.row * a.bs[0] + row.head * a.bs[1] + (u.q0 + row.i) * a.bs[2];
  float most = -INFINITY;
  for (int64_t key = 0; key < row.hi; ++key)
    if (key < row.sink || key >= row.lo) most = greater(most, load_any(a.bias, a.bias_dtype, at + (u.k0 + key) * a.bs[3]));
  return fabsf(most) > 4096.0f && fabsf(most) < INFINITY ? most : 0.0f;
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

// What to take off the scores of a row once they are scaled, so that the largest, `start`, becomes 0. Where that is so
// large that s * c - start * c, rounded once, is far from 0 or no number, it is taken off before.
static float shift_of(float *s, uint64_t panels, float start, float c) {
  const float shift = start * c;
  if (shift > -1048576.0f && shift < 1048576.0f) return shift;
  int64_t c0, c1;
  for (uint64_t bits = panels; next_run(bits, c0, c1);)
    for (int64_t i = c0; i < c1; ++i) s[i] -= start;
  return 0;
}

// The online softmax of one row over the panels in `panels`; c = factor from s to log2 scores. The maximum `m`, of s
// itself, may lose a NaN; the sum never does, so a row with a NaN (or with +inf, whose distance from the maximum is NaN)
// ends with l = NaN.
template <class T>
ADA_INLINE void softmax_row(float *s, typename T::elem *p, uint64_t panels, float c, float &m, float &l, float &alpha) {
  int64_t c0, c1;
  vf top0 = splat(-INFINITY), top1 = top0;
  for (uint64_t bits = panels; next_run(bits, c0, c1);)
    for (int64_t i = c0; i < c1; i += 2 * W) {
      top0 = vmax(top0, load(s + i));
      top1 = vmax(top1, load(s + i + W));
    }
  const float next = greater(m, hmax(vmax(top0, top1)));
  const float start = next > -INFINITY ? next : 0.0f;  // a row that has seen nothing yet, or NaN
  alpha = m > -INFINITY ? exp2f((m - start) * c) : 0.0f;
  vf sum0 = vf{}, sum1 = vf{};
  const vf cc = splat(c), mm = splat(shift_of(s, panels, start, c));
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

// Weights of 2 * W columns from i on, and what they add to the row's sum.
template <class T>
ADA_INLINE void soften(const float *s, typename T::elem *p, int64_t i, vf cc, vf mm, vf &sum0, vf &sum1) {
  vf x = exp2_neg<T::EXP_DEGREE>(load(s + i) * cc - mm);
  vf y = exp2_neg<T::EXP_DEGREE>(load(s + i + W) * cc - mm);
  sum0 += x;
  sum1 += y;
  store_p(T{}, p + i, x, y);
}

// The same for W rows at a time, whose reductions then share one tree and one exponential. Rows from `n` on are absent;
// `m`, `l` and `alpha` have room for W.
template <class T>
ADA_INLINE void softmax_rows(float *s, typename T::elem *p, int64_t ldp, const uint64_t *panels, int64_t n,
                             float c, float *m, float *l, float *alpha) {
  // While a row is exponentiated, the maximum of the row after next is found: comparing and multiplying use different
  // units, and a row comes into the cache once.
  vf part[W];
  float next[W + 2], start[W + 2], shift[W + 2];
  const vf before = load(m), cc = splat(c);
  const auto settle = [&](int64_t r, vf top) {
    next[r] = greater(m[r], hmax(top));
    start[r] = next[r] > -INFINITY ? next[r] : 0.0f;  // a row that has seen nothing yet
    shift[r] = shift_of(s + r * LDS, panels[r], start[r], c);
  };
  for (int64_t r = 0; r < 2 && r < n; ++r) settle(r, largest(s + r * LDS, panels[r]));
  for (int64_t r = 0; r < W; ++r) {
    part[r] = vf{};
    if (r >= n) {
      next[r] = -INFINITY, start[r] = 0;
      continue;
    }
    int64_t c0, c1;
    vf x0 = vf{}, y0 = vf{}, top0 = splat(-INFINITY), top1 = top0;
    const vf mm = splat(shift[r]);
    const float *sr = s + r * LDS;
    const bool ahead = r + 2 < n && r + 2 < W;
    if (ahead && panels[r + 2] == panels[r]) {
      const float *sn = sr + 2 * LDS;
      for (uint64_t bits = panels[r]; next_run(bits, c0, c1);)
        for (int64_t i = c0; i < c1; i += 2 * W) {
          top0 = vmax(top0, load(sn + i));
          top1 = vmax(top1, load(sn + i + W));
          soften<T>(sr, p + r * ldp, i, cc, mm, x0, y0);
        }
      top0 = vmax(top0, top1);
    } else {
      for (uint64_t bits = panels[r]; next_run(bits, c0, c1);)
        for (int64_t i = c0; i < c1; i += 2 * W) soften<T>(sr, p + r * ldp, i, cc, mm, x0, y0);
      if (ahead) top0 = largest(sr + 2 * LDS, panels[r + 2]);
    }
    if (ahead) settle(r + 2, top0);
    part[r] = x0 + y0;
  }
  const vf f = exp2_neg<5>((before - load(start)) * cc);
  store(m, load(next));
  store(alpha, f);
  store(l, load(l) * f + lanes_sum(part));
}

// `m` is the row's largest score, in natural logarithms.
static void finish_row(const ada_args &a, const AdaUnit &u, const Row &row, const float *o, float m, float l,
                       int64_t dv) {
  float inv = 0, lse = -INFINITY;
  if (l <= 0 && a.sink_logits) lse = a.sink_logits[row.head];  // the sink alone carries the row, without a value
  if (!(l <= 0)) {  // NaN, too, comes out
    if (a.sink_logits) {
      const float sink = a.sink_logits[row.head], next = greater(m, sink);
      const float f = expf(m - next), all = l * f + expf(sink - next);
      inv = f / all;
      if (a.lse) lse = next + logf(all);
    } else {
      inv = 1.0f / l;
      if (a.lse) lse = m + logf(l);
    }
  }
  const int64_t i = u.q0 + row.i;
  if (a.lse) a.lse[(u.row * a.q_heads + row.head) * a.q_len + i] = lse;
  if (!a.out) return;
  const int64_t at = u.row * a.os[0] + row.head * a.os[1] + i * a.os[2];
  if (l <= 0) {  // nothing seen; beside a sink of all weight a value's NaN still comes out
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

}  // namespace ADA_NS
