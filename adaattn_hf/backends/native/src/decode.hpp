// Few query rows (a decode step): keys and values are read once, where they lie, and never packed.
#pragma once
#include "softmax.hpp"

namespace ADA_NS {

constexpr int64_t FEW = 24;  // most query rows of one key/value head that this path takes

#if defined(__AVX512F__)
// s[r * LDS + key] = lane r * KB + key, for R rows of KB keys
template <int R> ADA_INLINE void scatter(float *s, __m512 x) {
  if constexpr (R == 1) {
    _mm512_storeu_ps(s, x);
  } else if constexpr (R == 2) {
    _mm256_storeu_ps(s, _mm512_castps512_ps256(x));
    _mm256_storeu_ps(s + LDS, _mm512_extractf32x8_ps(x, 1));
  } else {
    _mm_storeu_ps(s, _mm512_castps512_ps128(x));
    _mm_storeu_ps(s + LDS, _mm512_extractf32x4_ps(x, 1));
    _mm_storeu_ps(s + 2 * LDS, _mm512_extractf32x4_ps(x, 2));
    _mm_storeu_ps(s + 3 * LDS, _mm512_extractf32x4_ps(x, 3));
  }
}
#endif

template <int KD> struct KeyType { typedef float type; };
template <> struct KeyType<ADA_BF16> { typedef uint16_t type; };
template <> struct KeyType<ADA_F16> { typedef uint16_t type; };
template <> struct KeyType<ADA_I8> { typedef int8_t type; };

// W consecutive elements as float32
template <int KD> ADA_INLINE vf load_as(const typename KeyType<KD>::type *p) {
  if constexpr (KD == ADA_F32) return load(p);
#if defined(__AVX512F__)
  if constexpr (KD == ADA_BF16)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
  if constexpr (KD == ADA_F16) return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
  if constexpr (KD == ADA_I8) return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
  if constexpr (KD == ADA_BF16)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
  if constexpr (KD == ADA_F16) return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
  if constexpr (KD == ADA_I8) return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
  vf x;
  for (int i = 0; i < W; ++i) {
    if constexpr (KD == ADA_BF16) x[i] = from_bf16(p[i]);
    if constexpr (KD == ADA_F16) x[i] = from_f16(p[i]);
    if constexpr (KD == ADA_I8) x[i] = (float)p[i];
  }
  return x;
#endif
}

// The same for n < W elements; the rest is 0 and is not read.
template <int KD> ADA_INLINE vf load_part(const typename KeyType<KD>::type *p, int64_t n) {
  typename KeyType<KD>::type part[W] = {};
  memcpy(part, p, (size_t)n * sizeof(*p));
  return load_as<KD>(part);
}

// float32 arithmetic on keys and values of any type
template <int KD> struct Wide {
  typedef F32 T;
  typedef typename KeyType<KD>::type elem;
  static constexpr int64_t CHUNK = W;
  static constexpr bool SCALED = KD == ADA_I8, INTEGERS = false;

  template <int R>
  static void scores(const float *q, int64_t ldq, const float *, const elem *k, int64_t ldk, int64_t n, int64_t dim,
                     float *s) {
    const int64_t whole = dim / W * W;
    int64_t j = 0;
#if defined(__AVX512F__)
    constexpr int KB = 16 / R;
    const int64_t blocks = n % KB <= 2 ? n - n % KB : n;  // one or two keys are sooner done alone
    for (; j < blocks; j += KB) {
      vf acc[16] = {};
      const elem *row[KB];
#pragma GCC unroll 16
      for (int b = 0; b < KB; ++b) row[b] = k + lesser(j + b, n - 1) * ldk;
      for (int64_t d = 0; d < whole; d += W) {
        vf qv[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) qv[r] = load(q + r * ldq + d);
#pragma GCC unroll 16
        for (int b = 0; b < KB; ++b) {
          vf kv = load_as<KD>(row[b] + d);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) acc[r * KB + b] += qv[r] * kv;
        }
      }
      if (whole < dim)
        for (int b = 0; b < KB; ++b) {
          vf kv = load_part<KD>(row[b] + whole, dim - whole);
          for (int r = 0; r < R; ++r) acc[r * KB + b] += load(q + r * ldq + whole) * kv;
        }
      scatter<R>(s + j, (__m512)lanes_sum(acc));
    }
#endif
    for (; j < n; ++j) {
      const elem *row = k + j * ldk;
      vf acc[R] = {};
      for (int64_t d = 0; d < whole; d += W) {
        vf kv = load_as<KD>(row + d);
        for (int r = 0; r < R; ++r) acc[r] += load(q + r * ldq + d) * kv;
      }
      if (whole < dim) {
        vf kv = load_part<KD>(row + whole, dim - whole);
        for (int r = 0; r < R; ++r) acc[r] += load(q + r * ldq + whole) * kv;
      }
      for (int r = 0; r < R; ++r) s[r * LDS + j] = hsum(acc[r]);
    }
  }

  template <int R, int NC>
  ADA_INLINE void columns(const float *p, const elem *v, int64_t ldv, int64_t n, int64_t part, float *o, int64_t ldo,
                          const float *alpha) {
    vf acc[R][NC];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < NC; ++c) acc[r][c] = load(o + r * ldo + c * W) * splat(alpha[r]);
    for (int64_t j = 0; j < n; ++j) {
      vf vv[NC];
#pragma GCC unroll 4
      for (int c = 0; c < NC; ++c) vv[c] = part ? load_part<KD>(v + j * ldv, part) : load_as<KD>(v + j * ldv + c * W);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < NC; ++c) acc[r][c] += splat(p[r * LDS + j]) * vv[c];
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < NC; ++c) store(o + r * ldo + c * W, acc[r][c]);
  }

  template <int R>
  static void values(const float *p, const float *, const elem *v, int64_t ldv, int64_t n, int64_t dim, float *o,
                     int64_t ldo, const float *alpha) {
    int64_t d = 0;
    for (; d + 4 * W <= dim; d += 4 * W) columns<R, 4>(p, v + d, ldv, n, 0, o + d, ldo, alpha);
    for (; d + W <= dim; d += W) columns<R, 1>(p, v + d, ldv, n, 0, o + d, ldo, alpha);
    if (d < dim) columns<R, 1>(p, v + d, ldv, n, dim - d, o + d, ldo, alpha);
  }
};

#ifdef ADA_HAS_BF16
// bfloat16 pairs: two products per lane and instruction, accumulated in float32
struct Pairs {
  typedef BF16 T;
  typedef uint16_t elem;
  static constexpr int64_t CHUNK = 32;
  static constexpr bool SCALED = false, INTEGERS = false;

  ADA_INLINE __mmask32 mask_of(int64_t n) { return (__mmask32)((1ull << n) - 1); }

  template <int R>
  static void scores(const uint16_t *q, int64_t ldq, const float *, const elem *k, int64_t ldk, int64_t n, int64_t dim,
                     float *s) {
    constexpr int KB = 16 / R;
    const int64_t whole = dim / 32 * 32;
    const __mmask32 rest = mask_of(dim - whole);
    for (int64_t j = 0; j < n; j += KB) {
      __m512 acc[16];
      const elem *row[KB];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) acc[i] = _mm512_setzero_ps();
#pragma GCC unroll 16
      for (int b = 0; b < KB; ++b) row[b] = k + lesser(j + b, n - 1) * ldk;
      for (int64_t d = 0; d < dim; d += 32) {
        const __mmask32 m = d < whole ? ~(__mmask32)0 : rest;
        __m512bh qv[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) qv[r] = (__m512bh)_mm512_loadu_si512(q + r * ldq + d);
#pragma GCC unroll 16
        for (int b = 0; b < KB; ++b) {
          __m512bh kv = (__m512bh)_mm512_maskz_loadu_epi16(m, row[b] + d);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) acc[r * KB + b] = _mm512_dpbf16_ps(acc[r * KB + b], qv[r], kv);
        }
      }
      scatter<R>(s + j, (__m512)lanes_sum((const vf *)acc));
    }
  }

  // 32 * NC value channels: two keys are interleaved within 128-bit lanes, and put in order again at the end
  template <int R, int NC>
  ADA_INLINE void columns(const uint16_t *p, const elem *v, int64_t ldv, int64_t n, int64_t count, float *o,
                          int64_t ldo, const float *alpha) {
    const __mmask32 m = mask_of(lesser(count, (int64_t)32));
    __m512 acc[R][2 * NC];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < 2 * NC; ++c) acc[r][c] = _mm512_setzero_ps();
    for (int64_t j = 0; j < n; j += 2) {
      const elem *x = v + j * ldv, *y = j + 1 < n ? x + ldv : x;  // the weight of a repeated key is 0
#pragma GCC unroll 2
      for (int c = 0; c < NC; ++c) {
        __m512i a = _mm512_maskz_loadu_epi16(m, x + 32 * c), b = _mm512_maskz_loadu_epi16(m, y + 32 * c);
        __m512bh lo = (__m512bh)_mm512_unpacklo_epi16(a, b), hi = (__m512bh)_mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          int32_t pair;
          memcpy(&pair, p + r * LDP + j, 4);
          __m512bh pv = (__m512bh)_mm512_set1_epi32(pair);
          acc[r][2 * c] = _mm512_dpbf16_ps(acc[r][2 * c], pv, lo);
          acc[r][2 * c + 1] = _mm512_dpbf16_ps(acc[r][2 * c + 1], pv, hi);
        }
      }
    }
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < NC; ++c) {
        float *y = o + r * ldo + 32 * c;
        __m512 f = _mm512_set1_ps(alpha[r]);
        __m512 lo = _mm512_permutex2var_ps(acc[r][2 * c], first, acc[r][2 * c + 1]);
        __m512 hi = _mm512_permutex2var_ps(acc[r][2 * c], second, acc[r][2 * c + 1]);
        _mm512_storeu_ps(y, _mm512_fmadd_ps(_mm512_loadu_ps(y), f, lo));
        _mm512_storeu_ps(y + 16, _mm512_fmadd_ps(_mm512_loadu_ps(y + 16), f, hi));
      }
  }

  template <int R>
  static void values(const uint16_t *p, const float *, const elem *v, int64_t ldv, int64_t n, int64_t dim, float *o,
                     int64_t ldo, const float *alpha) {
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) columns<R, 2>(p, v + d, ldv, n, 64, o + d, ldo, alpha);
    for (; d < dim; d += 32) columns<R, 1>(p, v + d, ldv, n, dim - d, o + d, ldo, alpha);
  }
};
#endif

#ifdef ADA_HAS_BF16
// int8 keys and values against queries and weights in 16-bit integers: two products per lane and instruction, summed
// exactly. A row's scale makes its largest element LARGEST, so that no sum of ADA_KEYS products overflows.
struct Words {
  struct T {
    typedef int16_t elem;
    static constexpr int STEP = 2;
    static constexpr int EXP_DEGREE = 5;
  };
  typedef int8_t elem;
  static constexpr int64_t CHUNK = 32;
  static constexpr int64_t DIM = ADA_KEYS;  // largest head
  static constexpr bool SCALED = true, INTEGERS = true;
  static constexpr float LARGEST = 21845.0f;  // 128 * 21845 * 768 < 2^31

  ADA_INLINE __m512i widen(__mmask32 m, const elem *p) { return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(m, p)); }
  ADA_INLINE __mmask32 mask_of(int64_t n) { return (__mmask32)((1ull << n) - 1); }

  ADA_INLINE vf magnitude(const float *x) { return (vf)_mm512_abs_ps((__m512)load(x)); }
  ADA_INLINE void put(int16_t *to, const float *x, vf f) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32((__m512)(load(x) * f))));
  }
  // Elements of a query (n is a multiple of W) and of weights in some panels as integers; both return their unit.
  static float round(int16_t *to, const float *x, int64_t n) {
    vf top = vf{};
    for (int64_t i = 0; i < n; i += W) top = vmax(top, magnitude(x + i));
    const float peak = hmax(top);
    for (int64_t i = 0; i < n; i += W) put(to + i, x + i, splat(peak > 0 ? LARGEST / peak : 0.0f));
    return peak * (1.0f / LARGEST);
  }
  static float round(int16_t *to, const float *x, uint64_t panels) {
    vf top = vf{};
    int64_t c0, c1;
    for (uint64_t bits = panels; next_run(bits, c0, c1);)
      for (int64_t i = c0; i < c1; i += W) top = vmax(top, magnitude(x + i));
    const float peak = hmax(top);
    const vf f = splat(peak > 0 ? LARGEST / peak : 0.0f);
    for (uint64_t bits = panels; next_run(bits, c0, c1);)
      for (int64_t i = c0; i < c1; i += W) put(to + i, x + i, f);
    return peak * (1.0f / LARGEST);
  }

  template <int R>
  static void scores(const int16_t *q, int64_t ldq, const float *scale, const elem *k, int64_t ldk, int64_t n,
                     int64_t dim, float *s) {
    constexpr int KB = 16 / R;
    const int64_t whole = dim / 32 * 32;
    const __mmask32 rest = mask_of(dim - whole);
    float factors[16];
    for (int i = 0; i < 16; ++i) factors[i] = scale[i / KB];
    const vf factor = load(factors);
    for (int64_t j = 0; j < n; j += KB) {
      __m512i acc[16];
      const elem *row[KB];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) acc[i] = _mm512_setzero_si512();
#pragma GCC unroll 16
      for (int b = 0; b < KB; ++b) row[b] = k + lesser(j + b, n - 1) * ldk;
      for (int64_t d = 0; d < dim; d += 32) {
        const __mmask32 m = d < whole ? ~(__mmask32)0 : rest;
        __m512i qv[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) qv[r] = _mm512_loadu_si512(q + r * ldq + d);
#pragma GCC unroll 16
        for (int b = 0; b < KB; ++b) {
          const __m512i kv = widen(m, row[b] + d);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) acc[r * KB + b] = _mm512_dpwssd_epi32(acc[r * KB + b], qv[r], kv);
        }
      }
      scatter<R>(s + j, (__m512)((vf)_mm512_cvtepi32_ps(lanes_sum(acc)) * factor));
    }
  }

  // As in `Pairs`: two keys are interleaved within 128-bit lanes, and put in order again at the end.
  template <int R, int NC>
  ADA_INLINE void columns(const int16_t *p, const float *scale, const elem *v, int64_t ldv, int64_t n, int64_t count,
                          float *o, int64_t ldo, const float *alpha) {
    const __mmask32 m = mask_of(lesser(count, (int64_t)32));
    __m512i acc[R][2 * NC];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < 2 * NC; ++c) acc[r][c] = _mm512_setzero_si512();
    for (int64_t j = 0; j < n; j += 2) {
      const elem *x = v + j * ldv, *y = j + 1 < n ? x + ldv : x;  // the weight of a repeated key is 0
#pragma GCC unroll 2
      for (int c = 0; c < NC; ++c) {
        const __m512i a = widen(m, x + 32 * c), b = widen(m, y + 32 * c);
        const __m512i lo = _mm512_unpacklo_epi16(a, b), hi = _mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          int32_t pair;
          memcpy(&pair, p + r * LDP + j, 4);
          const __m512i pv = _mm512_set1_epi32(pair);
          acc[r][2 * c] = _mm512_dpwssd_epi32(acc[r][2 * c], pv, lo);
          acc[r][2 * c + 1] = _mm512_dpwssd_epi32(acc[r][2 * c + 1], pv, hi);
        }
      }
    }
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < NC; ++c) {
        float *y = o + r * ldo + 32 * c;
        const vf f = splat(scale[r]), keep = splat(alpha[r]);
        const __m512i lo = _mm512_permutex2var_epi32(acc[r][2 * c], first, acc[r][2 * c + 1]);
        const __m512i hi = _mm512_permutex2var_epi32(acc[r][2 * c], second, acc[r][2 * c + 1]);
        store(y, load(y) * keep + (vf)_mm512_cvtepi32_ps(lo) * f);
        store(y + W, load(y + W) * keep + (vf)_mm512_cvtepi32_ps(hi) * f);
      }
  }

  template <int R>
  static void values(const int16_t *p, const float *scale, const elem *v, int64_t ldv, int64_t n, int64_t dim, float *o,
                     int64_t ldo, const float *alpha) {
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) columns<R, 2>(p, scale, v + d, ldv, n, 64, o + d, ldo, alpha);
    for (; d < dim; d += 32) columns<R, 1>(p, scale, v + d, ldv, n, dim - d, o + d, ldo, alpha);
  }
};
static_assert(128ll * (int64_t)Words::LARGEST * ADA_KEYS < INT32_MAX, "sums of a tile fit into 32 bits");
#endif

template <class P> struct Few {  // working memory of one part
  typename P::T::elem *q, *p;
  float *s, *o, *m, *l, *alpha;
  float *q_scale, *p_scale;  // of integer queries and weights
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
  const bool special = a.softcap > 0 || a.bias || a.mask;
  const float c = special ? LOG2E : (float)(a.scaling * 1.4426950408889634);
  int64_t lo = INT64_MAX, hi = 0, sink = 0;
  for (int64_t r = 0; r < n; ++r) {
    Row &row = w.rows[r];
    row.head = u.head * sh.group + r / u.qn;
    row.i = r % u.qn;
    visible(a, u, row.i, row);
    if (row.lo < row.hi) lo = lesser(lo, row.lo), hi = greater(hi, row.hi);
    sink = greater(sink, row.sink);
    const int64_t at = u.row * a.qs[0] + row.head * a.qs[1] + (u.q0 + row.i) * a.qs[2];
    if constexpr (P::INTEGERS) {
      convert_row<F32>(w.s, a.q, a.q_dtype, at, a.qs[3], a.dim, ldq);
      w.q_scale[r] = P::round(w.q + r * ldq, w.s, ldq);
    } else {
      convert_row<T>(w.q + r * ldq, a.q, a.q_dtype, at, a.qs[3], a.dim, ldq);
    }
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
  const elem *vb = (const elem *)a.v + u.row * a.vs[0] + u.head * a.vs[1] + u.k0 * a.vs[2];
  const int64_t end = lesser(u.kn, (part + 1) * u.split);
  for (int64_t t0 = part * u.split; t0 < end; t0 += KEYS) {
    const int64_t t1 = lesser(t0 + KEYS, end);
    uint64_t panels = panel_bits(lo, lesser(hi, t1), t0) | panel_bits(0, lesser(sink, t1), t0), kept[FEW];
    if (a.keep) {
      uint64_t all = 0;
      for (int64_t r = 0; r < n; ++r) all |= kept[r] = kept_panels(a, u, w.rows[r], t0);
      panels &= all;
    }
    if (!panels) continue;
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
          const float *f = a.k_scale + u.row * a.kss[0] + u.head * a.kss[1] + (u.k0 + t0) * a.kss[2];
          const int64_t stop = lesser(c1, t1 - t0);
          for (int64_t j = c0; j < stop; ++j) s[j] *= f[j * a.kss[2]];
        }
        if (special) adjust(a, u, w.rows[r], s, c0, lesser(c1, t1 - t0), t0);
        if (t0 + c0 < w.rows[r].lo || t0 + c1 > w.rows[r].hi) hide(w.rows[r], s, c0, c1, t0);
      }
      if (a.keep) drop(panels & ~kept[r], s);
      if constexpr (P::INTEGERS) softmax_row<F32>(s, s, panels, c, w.m[r], w.l[r], w.alpha[r]);
      else softmax_row<T>(s, w.p + r * ldp, panels, c, w.m[r], w.l[r], w.alpha[r]);
      if constexpr (P::SCALED) {
        const float *f = a.v_scale + u.row * a.vss[0] + u.head * a.vss[1] + (u.k0 + t0) * a.vss[2];
        for (uint64_t bits = panels; next_run(bits, c0, c1);) {
          const int64_t stop = lesser(c1, t1 - t0);
          for (int64_t j = c0; j < stop; ++j) s[j] *= f[j * a.vss[2]];
        }
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
    const float *o = w.o + r * ldo;
    if (u.splits == 1) {
      finish_row(a, u, w.rows[r], o, w.m[r], w.l[r], a.dim_v);
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
      if (!(p[0] > -INFINITY)) continue;
      const float f = exp2f(p[0] - m);
      l += p[1] * f;
      for (int64_t d = 0; d < a.dim_v; ++d) o[d] += p[2 + d] * f;
    }
    Row row = {u.head * sh.group + r / u.qn, r % u.qn, 0, 0, 0};
    finish_row(a, u, row, o, m, l, a.dim_v);
  }
}

}  // namespace ADA_NS
