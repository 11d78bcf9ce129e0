// Which query rows a task covers, which keys they see, and the working memory of a tile.
#pragma once
#include "pack.hpp"

namespace ADA_NS {

constexpr int64_t KEYS = ADA_KEYS;
constexpr int64_t LDS = KEYS + 16;  // not a power of two: rows of a tile must not fall on the same cache sets
constexpr int64_t LDP = KEYS + 32;
constexpr int64_t ROWS = 24;  // with KEYS a measured optimum: weights and a panel of values stay in the L1 cache
constexpr float LOG2E = 1.44269504088896340736f, LN2 = 0.69314718055994530942f;

struct Row {
  int64_t head, i;       // query head, local query index
  int64_t lo, hi, sink;  // visible keys: [lo, hi) and [0, sink)
  float base;            // int8: what is taken off its sums with the bias; see far_bias
};

struct Strip {
  int64_t r0, rows, lo, hi, sink;
  uint64_t panels;  // panels of the present key tile that some row of the strip sees
  bool started;     // the output has been written to
};

// The working memory of one thread, laid out anew for every tile.
template <class T> struct Work {
  typename T::elem *q, *p, *stage;
  float *s, *o, *m, *l, *alpha;
  float *scale, *shift, *factor;  // int8: of the queries, of the scores and (W groups a row) of the weights
  Row *rows;
  Strip *strips;
  uint64_t *panels;  // of each row: what its strip computes
};

// Whether scores need more than a positive factor, which the hidden ones (-inf) bear as well.
ADA_INLINE bool is_special(const ada_args &a) { return a.softcap > 0 || a.bias || a.mask || !(a.scaling > 0); }

// The factor from what `softmax_row` is given, scores of special calls and products of others, to log2 scores.
ADA_INLINE float to_log2(const ada_args &a) { return is_special(a) ? LOG2E : (float)(a.scaling * 1.4426950408889634); }

// The same to natural logarithms.
ADA_INLINE float to_scores(const ada_args &a) { return is_special(a) ? 1.0f : (float)a.scaling; }

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
  w.factor = (float *)take(at, (ROWS + W) * W * 4);
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

// The mean that the keys of a unit are rid of; null if there is none.
ADA_INLINE const float *mean_of(const ada_args &a, const AdaUnit &u) {
  return a.key_mean ? a.key_mean + u.row * a.key_mean_row + u.head * a.dim : nullptr;
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

// Which query rows task `task` of a unit covers. Late rows come first: under a causal mask they have the most keys.
static int64_t task_rows(const ada_args &a, const AdaShape &sh, const AdaUnit &u, int64_t task, Row *rows) {
  const int64_t groups = (sh.group + u.heads_per - 1) / u.heads_per;
  const int64_t g0 = task % groups * u.heads_per, tile = u.row_tiles - 1 - task / groups;
  const int64_t heads = lesser(u.heads_per, sh.group - g0);
  const int64_t i0 = tile * sh.rows, i1 = lesser(u.qn, i0 + sh.rows);
  int64_t n = 0;
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = i0; i < i1; ++i, ++n) {
      rows[n].head = u.head * sh.group + g0 + h;
      rows[n].i = i;
      visible(a, u, i, rows[n]);
    }
  return n;
}

}  // namespace ADA_NS
