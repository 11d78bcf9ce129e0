// Few query rows (a decode step): keys and values are read once, where they lie, and never packed.
#pragma once
#include "pairs.hpp"
#include "stored.hpp"

namespace ADA_NS {

constexpr int64_t FEW = 24;  // most query rows of one key/value head that this path takes

template <class P> struct Few {  // working memory of one part
  typename P::T::elem *q, *p;
  float *s, *o, *m, *l, *alpha;
  float *q_scale, *p_scale;  // of integer queries and weights
  float *shift;              // of each row: its product with the mean that stored keys are rid of
  float *first;              // and with the first key
  float *k_scale, *v_scale;  // of the stored keys and values of a tile
  Row *rows;
};

template <class P> static int64_t few_layout(Few<P> &w, char *base, int64_t dim, int64_t dim_v) {
  char *at = base;
  const int64_t ldq = round_up(dim, P::CHUNK), ldo = round_up(dim_v, 64);
  w.q = (typename P::T::elem *)take(at, FEW * ldq * (int64_t)sizeof(typename P::T::elem));
  w.s = (float *)take(at, FEW * LDS * 4);
  w.p = P::T::STEP == 1 ? (typename P::T::elem *)w.s
                        : (typename P::T::elem *)take(at, FEW * LDP * (int64_t)sizeof(typename P::T::elem));
  w.o = (float *)take(at, FEW * ldo * 4);
  w.m = (float *)take(at, FEW * 4);
  w.l = (float *)take(at, FEW * 4);
  w.alpha = (float *)take(at, FEW * 4);
  w.q_scale = (float *)take(at, FEW * 4);
  w.p_scale = (float *)take(at, FEW * 4);
  w.shift = (float *)take(at, FEW * 4);
  w.first = (float *)take(at, FEW * 4);
  w.k_scale = (float *)take(at, KEYS * 4);
  w.v_scale = (float *)take(at, KEYS * 4);
  w.rows = (Row *)take(at, FEW * (int64_t)sizeof(Row));
  return at - base;
}

// Rows in groups of 4, 2 or 1.
#define ADA_GROUPS(n, CALL)                                      \
  for (int64_t r = 0; r < (n);) {                                \
    if ((n)-r >= 3) { CALL(4); r += 4; }                         \
    else if ((n)-r == 2) { CALL(2); r += 2; }                    \
    else { CALL(1); r += 1; }                                    \
  }

// One part of the keys of one unit; `partial` gets (m, l, o) per row when there are several parts.
template <class P>
static void few_rows(const ada_args &a, const AdaShape &sh, const AdaUnit &u, int64_t part, char *scratch) {
  typedef typename P::T T;
  typedef typename P::elem elem;
  constexpr int64_t ldp = T::STEP == 1 ? LDS : LDP;
  Few<P> w;
  few_layout<P>(w, scratch, a.dim, a.dim_v);
  const int64_t ldq = round_up(a.dim, P::CHUNK), ldo = round_up(a.dim_v, 64);
  const int64_t n = sh.group * u.qn;
  const bool special = is_special(a);
  const float c = to_log2(a);
  const float *first = P::SCALED && a.first_key ? a.first_key + (u.row * a.kv_heads + u.head) * a.dim : nullptr;
  int64_t lo = INT64_MAX, hi = 0, sink = 0;
  for (int64_t r = 0; r < n; ++r) {
    Row &row = w.rows[r];
    row.head = u.head * sh.group + r / u.qn;
    row.i = r % u.qn;
    visible(a, u, row.i, row);
    if (row.lo < row.hi) lo = lesser(lo, row.lo), hi = greater(hi, row.hi);
    sink = greater(sink, row.sink);
    const int64_t at = u.row * a.qs[0] + row.head * a.qs[1] + (u.q0 + row.i) * a.qs[2];
    w.shift[r] = w.first[r] = 0;
    if constexpr (P::SCALED) {
      convert_row<F32>(w.s, a.q, a.q_dtype, at, a.qs[3], a.dim, ldq);
      if (first)
        for (int64_t d = 0; d < a.dim; ++d) w.first[r] += w.s[d] * first[d];
      if (a.rotated & 1) rotate(w.s, a.dim);
      if (const float *mean = mean_of(a, u))
        for (int64_t d = 0; d < a.dim; ++d) w.shift[r] += w.s[d] * mean[d];
    }
    if constexpr (P::INTEGERS) w.q_scale[r] = P::round(w.q + r * ldq, w.s, ldq);
    else if constexpr (P::SCALED) memcpy(w.q + r * ldq, w.s, (size_t)ldq * 4);
    else convert_row<T>(w.q + r * ldq, a.q, a.q_dtype, at, a.qs[3], a.dim, ldq);
    w.m[r] = -INFINITY;
    w.l[r] = 0;
  }
  // a last group of 3 is computed as 4, the fourth on zeros
  const int64_t filled = n + (n % 4 == 3);
  for (int64_t r = n; r < filled; ++r) {
    memset(w.q + r * ldq, 0, (size_t)ldq * sizeof(*w.q));
    memset(w.p + r * ldp, 0, (size_t)KEYS * sizeof(*w.p));
    w.alpha[r] = 1;
    w.q_scale[r] = w.p_scale[r] = 0;
  }
  memset(w.o, 0, (size_t)(filled * ldo) * 4);
  const elem *kb = (const elem *)a.k + u.row * a.ks[0] + u.head * a.ks[1] + u.k0 * a.ks[2];
  const typename P::value *vb = (const typename P::value *)a.v + u.row * a.vs[0] + u.head * a.vs[1] + u.k0 * a.vs[2];
  const int64_t end = lesser(u.kn, (part + 1) * u.split);
  for (int64_t t0 = part * u.split; t0 < end; t0 += KEYS) {
    const int64_t t1 = lesser(t0 + KEYS, end);
    const uint64_t panels = panel_bits(lo, lesser(hi, t1), t0) | panel_bits(0, lesser(sink, t1), t0);
    if (!panels) continue;
    if constexpr (P::SCALED) {
      key_scales(w.k_scale, a, u, u.k0 + t0, t1 - t0);
      if (a.out) value_scales(w.v_scale, a, u, u.k0 + t0, t1 - t0);
    }
    int64_t c0, c1;
    for (uint64_t bits = panels; next_run(bits, c0, c1);) {
      const int64_t keys = lesser(c1, t1 - t0) - c0;
#define ADA_SCORES(R) \
  P::template scores<R>(w.q + r * ldq, ldq, w.q_scale + r, kb + (t0 + c0) * a.ks[2], a.ks[2], keys, a.dim, \
                        w.s + r * LDS + c0)
      ADA_GROUPS(n, ADA_SCORES)
    }
    for (int64_t r = 0; r < n; ++r) {
      float *s = w.s + r * LDS;
      for (uint64_t bits = panels; next_run(bits, c0, c1);) {
        if constexpr (P::SCALED) {
          const int64_t stop = lesser(c1, t1 - t0);
          for (int64_t j = c0; j < stop; ++j) s[j] = s[j] * w.k_scale[j] + w.shift[r];
          if (first && u.k0 + t0 + c0 == 0) s[0] = w.first[r];
        }
        if (special) adjust(a, u, w.rows[r], s, c0, lesser(c1, t1 - t0), t0);
        if (t0 + c0 < w.rows[r].lo || t0 + c1 > w.rows[r].hi) hide(w.rows[r], s, c0, c1, t0);
      }
      if constexpr (P::INTEGERS) softmax_row<F32>(s, s, panels, c, w.m[r], w.l[r], w.alpha[r]);
      else softmax_row<T>(s, w.p + r * ldp, panels, c, w.m[r], w.l[r], w.alpha[r]);
      if constexpr (P::SCALED)
        for (uint64_t bits = panels; a.out && next_run(bits, c0, c1);) {
          const int64_t stop = lesser(c1, t1 - t0);
          for (int64_t j = c0; j < stop; ++j) s[j] *= w.v_scale[j];
        }
      if constexpr (P::INTEGERS) w.p_scale[r] = P::round(w.p + r * ldp, s, panels);
    }
    if (!a.out) continue;
    for (uint64_t bits = panels; next_run(bits, c0, c1);) {
      const int64_t keys = lesser(c1, t1 - t0) - c0;
#define ADA_VALUES(R)                                                                                               \
  P::template values<R>(w.p + r * ldp + c0, w.p_scale + r, vb + (t0 + c0) * a.vs[2], a.vs[2], keys, a.dim_v,         \
                        w.o + r * ldo, ldo, w.alpha + r)
      ADA_GROUPS(n, ADA_VALUES)
      for (int64_t r = 0; r < n; ++r) w.alpha[r] = 1;
    }
  }
  for (int64_t r = 0; r < n; ++r) {
    float *o = w.o + r * ldo;
    if (P::SCALED && (a.rotated & 2)) rotate(o, a.dim_v);
    if (u.splits == 1) {
      finish_row(a, u, w.rows[r], o, w.m[r] * to_scores(a), w.l[r], a.dim_v);
    } else {
      float *p = u.partial + (part * n + r) * (a.dim_v + 2);
      p[0] = w.m[r];
      p[1] = w.l[r];
      memcpy(p + 2, o, (size_t)a.dim_v * 4);
    }
  }
}

// Puts the parts of a unit together, always in the same order.
static void merge_parts(const ada_args &a, const AdaShape &sh, const AdaUnit &u, char *scratch) {
  float *o = (float *)scratch;
  const int64_t n = sh.group * u.qn, size = a.dim_v + 2;
  for (int64_t r = 0; r < n; ++r) {
    float m = -INFINITY, l = 0;
    for (int64_t s = 0; s < u.splits; ++s) m = greater(m, u.partial[(s * n + r) * size]);
    memset(o, 0, (size_t)a.dim_v * 4);
    for (int64_t s = 0; s < u.splits; ++s) {
      const float *p = u.partial + (s * n + r) * size;
      if (p[0] == -INFINITY && p[1] == 0) continue;  // saw nothing
      const float f = exp2f((p[0] - m) * to_log2(a));
      l += p[1] * f;
      for (int64_t d = 0; d < a.dim_v; ++d) o[d] += p[2 + d] * f;
    }
    Row row = {u.head * sh.group + r / u.qn, r % u.qn, 0, 0, 0, 0};
    finish_row(a, u, row, o, m * to_scores(a), l, a.dim_v);
  }
}

}  // namespace ADA_NS
