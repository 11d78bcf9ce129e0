// One tile of query rows against all the keys that it can see: scores, online softmax, output.
#pragma once
#include "bytes.hpp"
#include "stored.hpp"

namespace ADA_NS {

// Maximum and sum of a row whose keys are walked in several calls.
ADA_INLINE float *unfinished_row(const AdaUnit &u, const AdaShape &sh, const Row &row) {
  return u.state + 2 * ((row.head - u.head * sh.group) * u.qn + row.i);
}

// Its output, float32 and not yet divided by the sum.
ADA_INLINE float *unfinished_out(const ada_args &a, const AdaUnit &u, const Row &row) {
  return (float *)a.out + u.row * a.os[0] + row.head * a.os[1] + (u.q0 + row.i) * a.os[2];
}

template <class T>
static void forward_tile(const ada_args &a, const AdaShape &sh, const AdaUnit &u, int64_t task, char *scratch) {
  typedef typename T::elem elem;
  constexpr int64_t ldp = T::STEP == 1 ? LDS : LDP;
  Work<T> w;
  layout<T>(w, scratch, sh.dk, sh.dv);
  const int64_t n = task_rows(a, sh, u, task, w.rows);
  const bool special = is_special(a);
  const float c = to_log2(a);
  constexpr bool BYTES = T::STEP == 4;  // whose maxima are those of log2 scores, times the scales of the values
  for (int64_t r = 0; r < n; ++r) w.rows[r].base = BYTES && a.bias ? far_bias(a, u, w.rows[r]) : 0.0f;
  int64_t strips = 0;
  for (int64_t r0 = 0; r0 < n; r0 += STRIP<T>, ++strips) {
    Strip &st = w.strips[strips];
    st = {r0, lesser(STRIP<T>, n - r0), INT64_MAX, 0, 0, 0, false};
    for (int64_t r = r0; r < r0 + st.rows; ++r) {
      if (w.rows[r].lo < w.rows[r].hi) {
        st.lo = lesser(st.lo, w.rows[r].lo);
        st.hi = greater(st.hi, w.rows[r].hi);
      }
      st.sink = greater(st.sink, w.rows[r].sink);
    }
  }
  const bool resumed = u.from > 0, unfinished = u.to < u.tiles;
  if (resumed && unfinished) {  // rows that see nothing here stay as they are
    int64_t hi = 0;
    for (int64_t i = 0; i < strips; ++i) hi = greater(hi, w.strips[i].hi);
    if (hi <= u.from * KEYS) return;
  }
  for (int64_t r = 0; r < ROWS + W; ++r) {
    w.m[r] = -INFINITY;
    w.l[r] = 0;
  }
  if (resumed) {
    for (int64_t i = 0; i < strips; ++i) w.strips[i].started = w.strips[i].hi > 0;
    for (int64_t r = 0; r < n; ++r) {
      const float *kept = unfinished_row(u, sh, w.rows[r]);
      w.m[r] = kept[0];
      w.l[r] = kept[1];
      memcpy(w.o + r * sh.dv, unfinished_out(a, u, w.rows[r]), (size_t)sh.dv * 4);
    }
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
  if (T::STEP == 2) open_tiles();
  for (int64_t t = u.from; t < u.to; ++t) {
    const int64_t t0 = t * KEYS;
    const char *pack = u.pack + (t - u.from) * u.tile_bytes;
    uint64_t any = 0;
    for (int64_t i = 0; i < strips; ++i) {
      Strip &st = w.strips[i];
      st.panels = panel_bits(st.lo, st.hi, t0) | panel_bits(0, st.sink, t0);
      any |= st.panels;
    }
    if (!any) continue;
    const elem *kp = (const elem *)pack, *vp = (const elem *)(pack + u.k_bytes);
#ifdef ADA_HAS_BF16
    const Scales &sc = *(const Scales *)(pack + u.tile_bytes - (int64_t)sizeof(Scales));  // int8 alone
    (void)sc;
#endif
    for (int64_t j = 0; j < KEYS / NR; ++j) {
      if (!(any >> j & 1)) continue;
      for (int64_t i = 0; i < strips; ++i) {
        const Strip &st = w.strips[i];
        if (!(st.panels >> j & 1)) continue;
#ifdef ADA_HAS_BF16
        if constexpr (T::STEP == 4)
          strip_scores(st.rows, w.q + st.r0 * sh.dk, sh.dk, kp + j * NR * sh.dk, sh.dk / 4, w.s + st.r0 * LDS + j * NR,
                       LDS, sc.start + j * NR, sc.key + j * NR, w.scale + st.r0, w.shift + st.r0);
        else
#endif
          strip<T, ZERO>(st.rows, w.q + st.r0 * sh.dk, sh.dk, kp + j * NR * sh.dk, sh.dk / T::STEP,
                         w.s + st.r0 * LDS + j * NR, LDS, nullptr);
      }
    }
    for (int64_t r = 0; r < n; ++r) {
      const Row &row = w.rows[r];
      float *s = w.s + r * LDS;
      w.panels[r] = w.strips[r / STRIP<T>].panels;
      int64_t c0, c1;
      for (uint64_t bits = w.panels[r]; next_run(bits, c0, c1);) {
        if (special) adjust(a, u, row, s, c0, c1, t0);
        if (row.base != 0)
          for (int64_t i = c0; i < c1; ++i) s[i] -= row.base;
        if (t0 + c0 < row.lo || t0 + c1 > row.hi) hide(row, s, c0, c1, t0);
      }
    }
    for (int64_t r = 0; r < n; r += W) {
#ifdef ADA_HAS_BF16
      if constexpr (T::STEP == 4)
        softmax_bytes(w.s + r * LDS, w.p + r * ldp, ldp, w.panels + r, n - r, c, sc, w.m + r, w.l + r,
                      w.alpha + r, w.factor + r * W);
      else
#endif
        softmax_rows<T>(w.s + r * LDS, w.p + r * ldp, ldp, w.panels + r, n - r, c, w.m + r, w.l + r, w.alpha + r);
    }
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
            const float *al = w.alpha + st.r0, *f = w.factor + st.r0 * W + c0 / GROUP;
            const int64_t from = c0 % GROUP, keys = stop - c0;
            if (!first) strip_values<ADD>(st.rows, p, ldp, v, from, keys, o, sh.dv, nullptr, f);
            else if (st.started) strip_values<SCALE>(st.rows, p, ldp, v, from, keys, o, sh.dv, al, f);
            else strip_values<ZERO>(st.rows, p, ldp, v, from, keys, o, sh.dv, nullptr, f);
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
  if (T::STEP == 2) close_tiles();
  if (unfinished) {
    for (int64_t r = 0; r < n; ++r) {
      float *kept = unfinished_row(u, sh, w.rows[r]);
      kept[0] = w.m[r];
      kept[1] = w.l[r];
      memcpy(unfinished_out(a, u, w.rows[r]), w.o + r * sh.dv, (size_t)sh.dv * 4);
    }
    return;
  }
  for (int64_t r = 0; r < n; ++r)
    finish_row(a, u, w.rows[r], w.o + r * sh.dv, w.m[r] * (BYTES ? LN2 : to_scores(a)) + w.rows[r].base, w.l[r],
               a.dim_v);
}

template <class T>
static void pack_tile(const ada_args &a, const AdaShape &sh, const AdaUnit &u, int64_t t, char *scratch) {
  typedef typename T::elem elem;
  Work<T> w;
  layout<T>(w, scratch, sh.dk, sh.dv);
  char *pack = u.pack + (t - u.from) * u.tile_bytes;
  elem *kp = (elem *)pack, *vp = (elem *)(pack + u.k_bytes);
  const int64_t key = u.k0 + t * KEYS, n = lesser(KEYS, u.kn - t * KEYS);
  const int64_t kb = u.row * a.ks[0] + u.head * a.ks[1] + key * a.ks[2];
  const int64_t vb = u.row * a.vs[0] + u.head * a.vs[1] + key * a.vs[2];
  const bool stored = a.kv_dtype == ADA_I8;
  for (int64_t j = 0; j < round_up(n, NR); j += NR) {
    if (stored) {
      widen_keys(w.s, a, u, key + j, lesser((int64_t)NR, n - j));
      pack_transposed<T>(kp + j * sh.dk, w.s, ADA_F32, 0, a.dim, 1, n - j, a.dim, sh.dk, w.stage);
    } else {
      pack_transposed<T>(kp + j * sh.dk, a.k, a.kv_dtype, kb + j * a.ks[2], a.ks[2], a.ks[3], n - j, a.dim, sh.dk,
                         w.stage);
    }
  }
  if (!a.out) return;
  for (int64_t j = 0; stored && j < n; j += NR) {
    const int64_t rows = lesser((int64_t)NR, n - j);
    widen_values(w.s, a, u, key + j, rows);
    pack_rows<T>(vp + j * NR, u.pitch, w.s, ADA_F32, 0, a.dim_v, 1, rows, a.dim_v, sh.dv, w.stage);
  }
  if (!stored) pack_rows<T>(vp, u.pitch, a.v, a.kv_dtype, vb, a.vs[2], a.vs[3], n, a.dim_v, sh.dv, w.stage);
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
  sh.extra = 0;
#ifdef ADA_HAS_BF16
  if (T::STEP == 4) sh.extra = (int64_t)sizeof(Scales);
#endif
  sh.rows = ROWS;
  Work<T> w;
  sh.scratch = layout<T>(w, nullptr, sh.dk, sh.dv);
}

}  // namespace ADA_NS
