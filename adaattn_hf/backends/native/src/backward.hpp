// Gradients of one unit (a segment and a key/value head): weights are recomputed from the log-sum-exp.
//
// Everything is laid out key by row: S^T = K Q^T and dP^T = V dO^T come out as rows of keys, so that P^T and dS^T are the
// left operands of dV += P^T dO and dK += dS^T Q as they stand, and dS^T is the right operand of dQ^T += K^T dS^T.
// Sums run over query tiles and key tiles in a fixed order within one thread: the result is the same every time.
#pragma once
#include "softmax.hpp"

namespace ADA_NS {

constexpr int64_t BACK_KEYS = 96;  // keys per tile
constexpr int64_t COLUMNS = 256;   // query columns per tile
constexpr int64_t LDC = COLUMNS + 16, LDW = COLUMNS + 32;

template <class T> struct Back {
  typedef typename T::elem elem;
  int64_t dk, dv, qn, kn;  // padded
  elem *k, *v, *kt;        // keys and values by row, keys by column
  elem *qt, *gt, *q, *g;   // queries and output gradients: packed by column, packed by row
  elem *p, *ds, *panels, *stage;
  float *s, *dp, *lse, *delta, *dq, *dkey, *dvalue;
  float *top, *sum;  // of rows whose scores are so large that their log-sum-exp has too few digits
  bool far;          // some row of the head is such a one
};

template <class T> static int64_t back_layout(Back<T> &w, char *base, const ada_args &a, int64_t qn, int64_t kn) {
  constexpr int64_t E = sizeof(typename T::elem);
  typedef typename T::elem elem;
  char *at = base;
  w.dk = round_up(a.dim, NR);
  w.dv = round_up(a.dim_v, NR);
  w.qn = round_up(qn, COLUMNS);
  w.kn = round_up(kn, BACK_KEYS);
  w.k = (elem *)take(at, w.kn * w.dk * E);
  w.v = (elem *)take(at, w.kn * w.dv * E);
  w.kt = (elem *)take(at, w.dk * w.kn * E);
  w.qt = (elem *)take(at, w.qn * w.dk * E);
  w.gt = (elem *)take(at, w.qn * w.dv * E);
  w.q = (elem *)take(at, w.qn * w.dk * E);
  w.g = (elem *)take(at, w.qn * w.dv * E);
  w.s = (float *)take(at, BACK_KEYS * LDC * 4);
  w.dp = (float *)take(at, BACK_KEYS * LDC * 4);
  w.p = T::STEP == 1 ? (elem *)w.s : (elem *)take(at, BACK_KEYS * LDW * E);
  w.ds = T::STEP == 1 ? (elem *)w.dp : (elem *)take(at, BACK_KEYS * LDW * E);
  w.panels = (elem *)take(at, BACK_KEYS * COLUMNS * E);
  w.stage = (elem *)take(at, greater(NR * greater(w.dk, w.dv), 4 * COLUMNS) * 4);
  w.lse = (float *)take(at, w.qn * 4);
  w.delta = (float *)take(at, w.qn * 4);
  w.top = (float *)take(at, w.qn * 4);
  w.sum = (float *)take(at, w.qn * 4);
  w.dq = (float *)take(at, w.dk * w.qn * 4);
  w.dkey = (float *)take(at, w.kn * w.dk * 4);
  w.dvalue = (float *)take(at, w.kn * w.dv * 4);
  return at - base;
}

// Queries [lo, hi) that see local key j.
ADA_INLINE void seen_by(const ada_args &a, const AdaUnit &u, int64_t j, int64_t &lo, int64_t &hi) {
  lo = 0;
  hi = u.qn;
  if (a.causal) lo = greater(lo, j - u.offset);
  if (u.window >= 0 && j >= u.sinks) {
    hi = lesser(hi, j + u.window - u.offset);
    if (!a.causal) lo = greater(lo, j - u.window + 1 - u.offset);
  }
  if (lo >= hi) lo = hi = 0;
}

// Scaling and softcap along one row of keys; `slope` gets the derivative of the softcap.
static void cap_column(const ada_args &a, float *s, float *slope, int64_t i0, int64_t i1) {
  const float scale = (float)a.scaling;
  if (a.softcap > 0) {
    const float cap = (float)a.softcap;
    for_vectors(s + i0, i1 - i0, [&](vf x) { return vtanh(x * splat(scale) / splat(cap)); });
    for (int64_t i = i0; i < i1; ++i) {
      slope[i] = 1 - s[i] * s[i];
      s[i] *= cap;
    }
    return;
  }
  for (int64_t i = i0; i < i1; ++i) {
    s[i] *= scale;
    slope[i] = 1;
  }
}

static void add_bias(const ada_args &a, const AdaUnit &u, int64_t head, int64_t j, float *s, int64_t i0, int64_t n) {
  const int64_t q = u.q0 + i0, key = u.k0 + j;
  if (a.bias) {
    const int64_t at = u.row * a.bs[0] + head * a.bs[1] + q * a.bs[2] + key * a.bs[3];
    for (int64_t i = 0; i < n; ++i) s[i] += load_any(a.bias, a.bias_dtype, at + i * a.bs[2]);
  }
  if (a.mask) {
    const uint8_t *m = a.mask + u.row * a.ms[0] + head * a.ms[1] + q * a.ms[2] + key * a.ms[3];
    for (int64_t i = 0; i < n; ++i)
      if (!m[i * a.ms[2]]) s[i] = -INFINITY;
  }
}

ADA_INLINE void keep(F32, float *to, vf x, vf y) {
  store(to, x);
  store(to + W, y);
}
#ifdef ADA_HAS_BF16
ADA_INLINE void keep(BF16, uint16_t *to, vf x, vf y) { store_p(BF16{}, to, x, y); }
#endif

ADA_INLINE float read(F32, float x) { return x; }
ADA_INLINE float read(BF16, uint16_t x) { return from_bf16(x); }
ADA_INLINE void write(F32, float &to, float x) { to = x; }
ADA_INLINE void write(BF16, uint16_t &to, float x) { to = to_bf16(x); }

// A row is far from 0 where adding the logarithm of its sum to its largest score would lose that.
ADA_INLINE bool is_far(float lse) { return fabsf(lse) > 4096.0f && fabsf(lse) < INFINITY; }

// One key more for the maxima and sums of the query columns [c0, c1); c = factor from s to log2 scores.
static void count_key(const float *s, float *top, float *sum, float c, int64_t c0, int64_t c1) {
  for (int64_t i = c0; i < c1; ++i) {
    if (s[i] > top[i]) sum[i] = sum[i] * exp2f((top[i] - s[i]) * c) + 1, top[i] = s[i];
    else if (s[i] > -INFINITY) sum[i] += exp2f((s[i] - top[i]) * c);
  }
}

// P^T and dS^T of one key over query columns [c0, c1).
template <class T>
ADA_INLINE void weights_row(float *s, float *dp, const float *slope, typename T::elem *p, typename T::elem *ds, float c,
                            const float *lse, const float *delta, int64_t c0, int64_t c1) {
  const vf cc = splat(c);
  for (int64_t i = c0; i < c1; i += 2 * W) {
    vf x = exp2_neg<T::EXP_DEGREE>(load(s + i) * cc - load(lse + i));
    vf y = exp2_neg<T::EXP_DEGREE>(load(s + i + W) * cc - load(lse + i + W));
    vf dx = x * (load(dp + i) - load(delta + i)), dy = y * (load(dp + i + W) - load(delta + i + W));
    if (slope) {
      dx *= load(slope + i);
      dy *= load(slope + i + W);
    }
    keep(T{}, p + i, x, y);
    keep(T{}, ds + i, dx, dy);
  }
}

template <class T> static void pack_unit(const ada_args &a, const AdaUnit &u, Back<T> &w) {
  const int64_t kb = u.row * a.ks[0] + u.head * a.ks[1] + u.k0 * a.ks[2];
  const int64_t vb = u.row * a.vs[0] + u.head * a.vs[1] + u.k0 * a.vs[2];
  for (int64_t j = 0; j < w.kn; ++j) {
    typename T::elem *k = w.k + j * w.dk, *v = w.v + j * w.dv;
    if (j < u.kn) {
      convert_row<T>(k, a.k, a.kv_dtype, kb + j * a.ks[2], a.ks[3], a.dim, w.dk);
      convert_row<T>(v, a.v, a.kv_dtype, vb + j * a.vs[2], a.vs[3], a.dim_v, w.dv);
    } else {
      memset(k, 0, (size_t)w.dk * sizeof(*k));
      memset(v, 0, (size_t)w.dv * sizeof(*v));
    }
  }
  for (int64_t j0 = 0; j0 < w.kn; j0 += 32)
    for (int64_t d = 0; d < w.dk; ++d)
      for (int64_t j = j0; j < j0 + 32; ++j) w.kt[d * w.kn + j] = w.k[j * w.dk + d];
  memset(w.dkey, 0, (size_t)(w.kn * w.dk) * 4);
  memset(w.dvalue, 0, (size_t)(w.kn * w.dv) * 4);
}

template <class T> static void pack_head(const ada_args &a, const AdaUnit &u, int64_t head, Back<T> &w) {
  const int64_t qb = u.row * a.qs[0] + head * a.qs[1] + u.q0 * a.qs[2];
  const int64_t gb = u.row * a.gs[0] + head * a.gs[1] + u.q0 * a.gs[2];
  const int64_t ob = u.row * a.os[0] + head * a.os[1] + u.q0 * a.os[2];
  for (int64_t i = 0; i < round_up(u.qn, NR); i += NR) {
    pack_transposed<T>(w.qt + i * w.dk, a.q, a.q_dtype, qb + i * a.qs[2], a.qs[2], a.qs[3], u.qn - i, a.dim, w.dk,
                       w.stage);
    pack_transposed<T>(w.gt + i * w.dv, a.dout, a.q_dtype, gb + i * a.gs[2], a.gs[2], a.gs[3], u.qn - i, a.dim_v, w.dv,
                       w.stage);
  }
  pack_rows<T>(w.q, w.qn, a.q, a.q_dtype, qb, a.qs[2], a.qs[3], u.qn, a.dim, w.dk, w.stage);
  pack_rows<T>(w.g, w.qn, a.dout, a.q_dtype, gb, a.gs[2], a.gs[3], u.qn, a.dim_v, w.dv, w.stage);
  const int64_t done = round_up(u.qn, T::STEP), padded = round_up(u.qn, NR);
  for (int64_t d = 0; d < w.dk; d += NR)
    memset(w.q + d * w.qn + done * NR, 0, (size_t)((padded - done) * NR) * sizeof(*w.q));
  for (int64_t d = 0; d < w.dv; d += NR)
    memset(w.g + d * w.qn + done * NR, 0, (size_t)((padded - done) * NR) * sizeof(*w.g));
  const float *lse = a.lse + (u.row * a.q_heads + head) * a.q_len + u.q0;
  w.far = false;
  for (int64_t i = 0; i < w.qn; ++i) {
    w.lse[i] = INFINITY;  // a row that sees nothing has no weights
    w.delta[i] = w.sum[i] = 0;
    w.top[i] = -INFINITY;
    if (i >= u.qn) continue;
    if (!(lse[i] == -INFINITY)) w.lse[i] = lse[i] * LOG2E;
    w.far |= is_far(lse[i]);
    if (a.sink_logits) w.top[i] = a.sink_logits[head] / to_scores(a), w.sum[i] = 1;
    float sum = 0;
    if (a.q_dtype == ADA_F32 && a.gs[3] == 1 && a.os[3] == 1) {
      const float *x = (const float *)a.dout + gb + i * a.gs[2], *y = (const float *)a.out + ob + i * a.os[2];
      for (int64_t d = 0; d < a.dim_v; ++d) sum += x[d] * y[d];
    } else {
      for (int64_t d = 0; d < a.dim_v; ++d)
        sum += load_any(a.dout, a.q_dtype, gb + i * a.gs[2] + d * a.gs[3]) *
               load_any(a.out, a.q_dtype, ob + i * a.os[2] + d * a.os[3]);
    }
    w.delta[i] = sum;
  }
  memset(w.dq, 0, (size_t)(w.dk * w.qn) * 4);
}

// The products of one tile of keys with one tile of query columns; with `counting` only their scores' maxima and sums.
template <class T>
static void backward_tile(const ada_args &a, const AdaUnit &u, int64_t head, int64_t j0, int64_t i0, Back<T> &w,
                          bool counting) {
  typedef typename T::elem elem;
  constexpr int64_t ldp = T::STEP == 1 ? LDC : LDW;
  constexpr int64_t STRIPS = (BACK_KEYS + STRIP<T> - 1) / STRIP<T>;
  const bool special = is_special(a);
  const float c = to_log2(a);
  uint64_t bits[STRIPS], any = 0;
  const int64_t rows = lesser(BACK_KEYS, u.kn - j0);
  for (int64_t s = 0; s < STRIPS; ++s) {
    bits[s] = 0;
    for (int64_t j = s * STRIP<T>; j < lesser((s + 1) * STRIP<T>, rows); ++j) {
      int64_t lo, hi;
      seen_by(a, u, j0 + j, lo, hi);
      bits[s] |= panel_bits(lo, hi, i0, COLUMNS);
    }
    any |= bits[s];
  }
  if (!any) return;
  for (int64_t n = 0; n < COLUMNS / NR; ++n) {
    if (!(any >> n & 1)) continue;
    const elem *qt = w.qt + (i0 + n * NR) * w.dk, *gt = w.gt + (i0 + n * NR) * w.dv;
    for (int64_t s = 0; s < STRIPS; ++s) {
      if (!(bits[s] >> n & 1)) continue;
      const int64_t r = s * STRIP<T>, count = lesser(STRIP<T>, BACK_KEYS - r);
      strip<T, ZERO>(count, w.k + (j0 + r) * w.dk, w.dk, qt, w.dk / T::STEP, w.s + r * LDC + n * NR, LDC, nullptr);
      if (counting) continue;
      strip<T, ZERO>(count, w.v + (j0 + r) * w.dv, w.dv, gt, w.dv / T::STEP, w.dp + r * LDC + n * NR, LDC, nullptr);
    }
  }
  float slope[COLUMNS];
  for (int64_t s = 0; s < STRIPS; ++s)
    for (int64_t j = s * STRIP<T>; j < lesser((s + 1) * STRIP<T>, BACK_KEYS); ++j) {
      float *sj = w.s + j * LDC, *dpj = w.dp + j * LDC;
      elem *pj = w.p + j * ldp, *dsj = w.ds + j * ldp;
      int64_t lo = 0, hi = 0, c0, c1;
      if (j < rows) seen_by(a, u, j0 + j, lo, hi);
      lo -= i0;
      hi -= i0;
      for (uint64_t left = bits[s]; next_run(left, c0, c1);) {
        if (special && j < rows) {
          cap_column(a, sj, slope, c0, c1);
          const int64_t from = greater(c0, lo), to = lesser(c1, hi);
          if (from < to) add_bias(a, u, head, j0 + j, sj + from, i0 + from, to - from);
        }
        for (int64_t i = c0; i < lesser(c1, lo); ++i) sj[i] = -INFINITY;
        for (int64_t i = greater(c0, hi); i < c1; ++i) sj[i] = -INFINITY;
        if (counting) {
          count_key(sj, w.top + i0, w.sum + i0, c, c0, c1);
          continue;
        }
        for (int64_t i = c0; w.far && i < c1; ++i) sj[i] -= w.top[i0 + i];
        // the bias is added after the softcap, so its gradient is taken before the softcap's slope
        const float *factor = special && a.softcap > 0 ? slope : nullptr;
        weights_row<T>(sj, dpj, a.dbias ? nullptr : factor, pj, dsj, c, w.lse + i0, w.delta + i0, c0, c1);
        if (a.dbias && j < rows) {
          float *b = a.dbias + u.row * a.dbs[0] + head * a.dbs[1] + (u.q0 + i0) * a.dbs[2] + (u.k0 + j0 + j) * a.dbs[3];
          for (int64_t i = greater(c0, lo); i < lesser(c1, hi); ++i) b[i * a.dbs[2]] = read(T{}, dsj[i]);
          for (int64_t i = c0; factor && i < c1; ++i) write(T{}, dsj[i], read(T{}, dsj[i]) * slope[i]);
        }
      }
      for (uint64_t left = counting ? 0 : any & ~bits[s]; next_run(left, c0, c1);)
        memset(dsj + c0, 0, (size_t)(c1 - c0) * sizeof(elem));
    }
  if (counting) return;
  const elem *q = w.q + i0 * NR, *g = w.g + i0 * NR;
  for (int64_t d = 0; d < greater(w.dk, w.dv); d += NR)
    for (int64_t s = 0; s < STRIPS; ++s) {
      const int64_t r = s * STRIP<T>, count = lesser(STRIP<T>, BACK_KEYS - r);
      int64_t c0, c1;
      for (uint64_t left = bits[s]; next_run(left, c0, c1);) {
        const int64_t steps = (c1 - c0) / T::STEP;
        if (d < w.dv)
          strip<T, ADD>(count, w.p + r * ldp + c0, ldp, g + d * w.qn + c0 * NR, steps, w.dvalue + (j0 + r) * w.dv + d,
                        w.dv, nullptr);
        if (d < w.dk)
          strip<T, ADD>(count, w.ds + r * ldp + c0, ldp, q + d * w.qn + c0 * NR, steps, w.dkey + (j0 + r) * w.dk + d,
                        w.dk, nullptr);
      }
    }
  pack_rows<T>(w.panels, BACK_KEYS, w.ds, T::STEP == 1 ? ADA_F32 : ADA_BF16, 0, ldp, 1, BACK_KEYS, COLUMNS, COLUMNS, w.stage);
  for (int64_t n = 0; n < COLUMNS / NR; ++n) {
    if (!(any >> n & 1)) continue;
    for (int64_t d = 0; d < w.dk; d += STRIP<T>)
      strip<T, ADD>(lesser(STRIP<T>, w.dk - d), w.kt + d * w.kn + j0, w.kn, w.panels + n * NR * BACK_KEYS,
                    BACK_KEYS / T::STEP, w.dq + d * w.qn + i0 + n * NR, w.qn, nullptr);
  }
}

template <class T>
static void backward_unit(const ada_args &a, const AdaShape &sh, const AdaUnit &u, char *scratch) {
  Back<T> w;
  back_layout<T>(w, scratch, a, u.qn, u.kn);
  pack_unit<T>(a, u, w);
  if (T::STEP == 2) open_tiles();
  const float scale = (float)a.scaling;
  for (int64_t h = 0; h < sh.group; ++h) {
    const int64_t head = u.head * sh.group + h;
    pack_head<T>(a, u, head, w);
    const auto walk = [&](bool counting) {
      for (int64_t j0 = 0; j0 < u.kn; j0 += BACK_KEYS)
        for (int64_t i0 = 0; i0 < u.qn; i0 += COLUMNS) backward_tile<T>(a, u, head, j0, i0, w, counting);
    };
    if (w.far) {
      walk(true);
      const float *lse = a.lse + (u.row * a.q_heads + head) * a.q_len + u.q0;
      for (int64_t i = 0; i < w.qn; ++i) {
        if (i < u.qn && is_far(lse[i])) w.lse[i] = log2f(w.sum[i]);
        else w.top[i] = 0;
      }
    }
    walk(false);
    if (a.dq)
      for (int64_t i = 0; i < u.qn; ++i) {
        const int64_t at = u.row * a.dqs[0] + head * a.dqs[1] + (u.q0 + i) * a.dqs[2];
        for (int64_t d = 0; d < a.dim; ++d) store_any(a.dq, a.q_dtype, at + d * a.dqs[3], w.dq[d * w.qn + i] * scale);
      }
  }
  if (T::STEP == 2) close_tiles();
  for (int64_t j = 0; j < u.kn; ++j) {
    const int64_t key = u.k0 + j;
    if (a.dk) {
      const int64_t at = u.row * a.dks[0] + u.head * a.dks[1] + key * a.dks[2];
      for (int64_t d = 0; d < a.dim; ++d) store_any(a.dk, a.kv_dtype, at + d * a.dks[3], w.dkey[j * w.dk + d] * scale);
    }
    if (a.dv) {
      const int64_t at = u.row * a.dvs[0] + u.head * a.dvs[1] + key * a.dvs[2];
      for (int64_t d = 0; d < a.dim_v; ++d) store_any(a.dv, a.kv_dtype, at + d * a.dvs[3], w.dvalue[j * w.dv + d]);
    }
  }
}

}  // namespace ADA_NS
