// The same for elements of 16 bits: two products per lane and instruction. What bfloat16 and integers share is the way
// through keys and channels; what they differ in is an `Op`.
#pragma once
#include "wide.hpp"

#ifdef ADA_HAS_BF16
namespace ADA_NS {

template <class Op> struct Paired {
  typedef typename Op::row_elem row_elem;  // of queries and weights
  typedef typename Op::elem elem;          // of keys
  typedef typename Op::value value;        // of values: two channels each where they have four bits
  typedef typename Op::sum sum;
  static constexpr int64_t CHUNK = 32;

  ADA_INLINE __mmask32 mask_of(int64_t n) { return (__mmask32)((1ull << n) - 1); }

  template <int R>
  static void scores(const row_elem *q, int64_t ldq, const float *scale, const elem *k, int64_t ldk, int64_t n,
                     int64_t dim, float *s) {
    constexpr int KB = 16 / R;
    const int64_t whole = dim / 32 * 32;
    const __mmask32 rest = mask_of(dim - whole);
    const vf factor = Op::template factors<KB>(scale);
    for (int64_t j = 0; j < n; j += KB) {
      sum acc[16];
      const elem *row[KB];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) acc[i] = Op::zero();
#pragma GCC unroll 16
      for (int b = 0; b < KB; ++b) row[b] = k + lesser(j + b, n - 1) * ldk;
      for (int64_t d = 0; d < dim; d += 32) {
        const __mmask32 m = d < whole ? ~(__mmask32)0 : rest;
        __m512i qv[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) qv[r] = _mm512_loadu_si512(q + r * ldq + d);
#pragma GCC unroll 16
        for (int b = 0; b < KB; ++b) {
          const __m512i kv = Op::words(m, row[b] + d);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) acc[r * KB + b] = Op::dot(acc[r * KB + b], qv[r], kv);
        }
      }
      scatter<R>(s + j, (__m512)Op::total(acc, factor));
    }
  }

  // 32 * NC value channels: two keys are interleaved within 128-bit lanes, and put in order again at the end
  template <int R, int NC>
  ADA_INLINE void columns(const row_elem *p, const float *scale, const value *v, int64_t ldv, int64_t n, int64_t d,
                          int64_t count, float *o, int64_t ldo, const float *alpha) {
    const __mmask32 m = mask_of(lesser(count, (int64_t)32));
    sum acc[R][2 * NC];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < 2 * NC; ++c) acc[r][c] = Op::zero();
    for (int64_t j = 0; j < n; j += 2) {
      const value *x = v + j * ldv, *y = j + 1 < n ? x + ldv : x;  // the weight of a repeated key is 0
#pragma GCC unroll 2
      for (int c = 0; c < NC; ++c) {
        const __m512i a = Op::channels(m, x, d + 32 * c), b = Op::channels(m, y, d + 32 * c);
        const __m512i lo = _mm512_unpacklo_epi16(a, b), hi = _mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          int32_t pair;
          memcpy(&pair, p + r * LDP + j, 4);
          const __m512i pv = _mm512_set1_epi32(pair);
          acc[r][2 * c] = Op::dot(acc[r][2 * c], pv, lo);
          acc[r][2 * c + 1] = Op::dot(acc[r][2 * c + 1], pv, hi);
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
        const sum lo = acc[r][2 * c], hi = acc[r][2 * c + 1];
        store(y, Op::add(load(y), alpha[r], Op::order(lo, first, hi), scale + r));
        store(y + W, Op::add(load(y + W), alpha[r], Op::order(lo, second, hi), scale + r));
      }
  }

  template <int R>
  static void values(const row_elem *p, const float *scale, const value *v, int64_t ldv, int64_t n, int64_t dim,
                     float *o, int64_t ldo, const float *alpha) {
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) columns<R, 2>(p, scale, v, ldv, n, d, 64, o + d, ldo, alpha);
    for (; d < dim; d += 32) columns<R, 1>(p, scale, v, ldv, n, d, dim - d, o + d, ldo, alpha);
  }
};

// bfloat16, accumulated in float32
struct InFloats {
  typedef uint16_t row_elem;
  typedef uint16_t elem;
  typedef uint16_t value;
  typedef __m512 sum;

  ADA_INLINE sum zero() { return _mm512_setzero_ps(); }
  ADA_INLINE __m512i words(__mmask32 m, const elem *p) { return _mm512_maskz_loadu_epi16(m, p); }
  ADA_INLINE __m512i channels(__mmask32 m, const value *row, int64_t d) { return words(m, row + d); }
  ADA_INLINE sum dot(sum x, __m512i a, __m512i b) { return _mm512_dpbf16_ps(x, (__m512bh)a, (__m512bh)b); }
  template <int KB> ADA_INLINE vf factors(const float *) { return vf{}; }
  ADA_INLINE vf total(const sum *acc, vf) { return lanes_sum((const vf *)acc); }
  ADA_INLINE vf order(sum lo, __m512i places, sum hi) { return (vf)_mm512_permutex2var_ps(lo, places, hi); }
  ADA_INLINE vf add(vf y, float keep, vf x, const float *) {
    return (vf)_mm512_fmadd_ps((__m512)y, _mm512_set1_ps(keep), (__m512)x);
  }
};

// int8 keys and values against queries and weights in 16-bit integers, summed exactly
struct InIntegers {
  typedef int16_t row_elem;
  typedef int8_t elem;
  typedef int8_t value;
  typedef __m512i sum;

  ADA_INLINE sum zero() { return _mm512_setzero_si512(); }
  ADA_INLINE __m512i words(__mmask32 m, const elem *p) { return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(m, p)); }
  ADA_INLINE __m512i channels(__mmask32 m, const value *row, int64_t d) { return words(m, row + d); }
  ADA_INLINE sum dot(sum x, __m512i a, __m512i b) { return _mm512_dpwssd_epi32(x, a, b); }
  template <int KB> ADA_INLINE vf factors(const float *scale) {
    float each[16];
    for (int i = 0; i < 16; ++i) each[i] = scale[i / KB];
    return load(each);
  }
  ADA_INLINE vf total(const sum *acc, vf factor) { return (vf)_mm512_cvtepi32_ps(lanes_sum(acc)) * factor; }
  ADA_INLINE vf order(sum lo, __m512i places, sum hi) {
    return (vf)_mm512_cvtepi32_ps(_mm512_permutex2var_epi32(lo, places, hi));
  }
  ADA_INLINE vf add(vf y, float keep, vf x, const float *scale) { return y * splat(keep) + x * splat(*scale); }
};

// the same with values of four bits
struct InNibbles : InIntegers {
  typedef uint8_t value;

  ADA_INLINE __m512i channels(__mmask32, const value *row, int64_t d) {  // d is a multiple of 32
    const __m256i pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(row + d / 2)));
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(pairs), _mm256_srli_epi16(pairs, 4), 1);
    const __m512i n = _mm512_and_si512(both, _mm512_set1_epi16(15));
    return _mm512_sub_epi16(_mm512_add_epi16(n, n), _mm512_set1_epi16(15));
  }
};

struct Pairs : Paired<InFloats> {
  typedef BF16 T;
  static constexpr bool SCALED = false, INTEGERS = false;
};

// A row's scale makes its largest element LARGEST, so that no sum of ADA_KEYS products overflows.
constexpr int64_t DIM = ADA_KEYS;  // largest head
constexpr float LARGEST = 21845.0f;  // 128 * 21845 * 768 < 2^31
template <class Op> struct Words : Paired<Op> {
  struct T {
    typedef int16_t elem;
    static constexpr int STEP = 2;
    static constexpr int EXP_DEGREE = 5;
  };
  static constexpr bool SCALED = true, INTEGERS = true;

  ADA_INLINE vf magnitude(const float *x) { return (vf)_mm512_abs_ps((__m512)load(x)); }
  ADA_INLINE void put(int16_t *to, const float *x, vf f) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32((__m512)(load(x) * f))));
  }
  // Elements of a query (n is a multiple of W) and of weights in some panels as integers; both return their unit, which
  // is NaN where an element is NaN or infinite.
  static float round(int16_t *to, const float *x, int64_t n) {
    vf top = vf{}, broken = top;
    for (int64_t i = 0; i < n; i += W) {
      top = vmax(top, magnitude(x + i));
      broken += load(x + i) * vf{};
    }
    const float peak = hmax(top);
    for (int64_t i = 0; i < n; i += W) put(to + i, x + i, splat(peak > 0 ? LARGEST / peak : 0.0f));
    return peak * (1.0f / LARGEST) + hsum(broken);
  }
  static float round(int16_t *to, const float *x, uint64_t panels) {
    vf top = vf{}, broken = top;
    int64_t c0, c1;
    for (uint64_t bits = panels; next_run(bits, c0, c1);)
      for (int64_t i = c0; i < c1; i += W) {
        top = vmax(top, magnitude(x + i));
        broken += load(x + i) * vf{};
      }
    const float peak = hmax(top);
    const vf f = splat(peak > 0 ? LARGEST / peak : 0.0f);
    for (uint64_t bits = panels; next_run(bits, c0, c1);)
      for (int64_t i = c0; i < c1; i += W) put(to + i, x + i, f);
    return peak * (1.0f / LARGEST) + hsum(broken);
  }
};
static_assert(128ll * (int64_t)LARGEST * ADA_KEYS < INT32_MAX, "sums of a tile fit into 32 bits");

}  // namespace ADA_NS
#endif
