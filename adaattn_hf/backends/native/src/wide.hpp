// Products of few query rows with keys and values where they lie, in float32 arithmetic.
#pragma once
#include "softmax.hpp"

namespace ADA_NS {

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
template <> struct KeyType<ADA_I4> { typedef uint8_t type; };

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

// W channels of a value from channel d on: of four bits, d and the extent are multiples of W and of 32.
template <int VD> ADA_INLINE vf load_channels(const typename KeyType<VD>::type *row, int64_t d) {
  if constexpr (VD != ADA_I4) return load_as<VD>(row + d);
  const uint8_t *p = (const uint8_t *)row + d / 32 * 16 + d % 16;
  const int shift = (int)(d % 32 / 16 * 4);
#if defined(__AVX512F__)
  const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  const __m512i n = _mm512_and_si512(_mm512_srl_epi32(x, _mm_cvtsi32_si128(shift)), _mm512_set1_epi32(15));
  return (vf)_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_add_epi32(n, n), _mm512_set1_epi32(15)));
#elif defined(__AVX2__)
  const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
  const __m256i n = _mm256_and_si256(_mm256_srl_epi32(x, _mm_cvtsi32_si128(shift)), _mm256_set1_epi32(15));
  return (vf)_mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_add_epi32(n, n), _mm256_set1_epi32(15)));
#else
  vf x;
  for (int i = 0; i < W; ++i) x[i] = (float)(2 * (p[i] >> shift & 15) - 15);
  return x;
#endif
}

// float32 arithmetic on keys and values of any type
template <int KD, int VD = KD> struct Wide {
  typedef F32 T;
  typedef typename KeyType<KD>::type elem;
  typedef typename KeyType<VD>::type value;
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
  ADA_INLINE void columns(const float *p, const value *v, int64_t ldv, int64_t n, int64_t d, int64_t part, float *o,
                          int64_t ldo, const float *alpha) {
    vf acc[R][NC];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < NC; ++c) acc[r][c] = load(o + r * ldo + c * W) * splat(alpha[r]);
    for (int64_t j = 0; j < n; ++j) {
      vf vv[NC];
#pragma GCC unroll 4
      for (int c = 0; c < NC; ++c)
        vv[c] = part ? load_part<VD>(v + j * ldv + d, part) : load_channels<VD>(v + j * ldv, d + c * W);
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
  static void values(const float *p, const float *, const value *v, int64_t ldv, int64_t n, int64_t dim, float *o,
                     int64_t ldo, const float *alpha) {
    int64_t d = 0;
    for (; d + 4 * W <= dim; d += 4 * W) columns<R, 4>(p, v, ldv, n, d, 0, o + d, ldo, alpha);
    for (; d + W <= dim; d += W) columns<R, 1>(p, v, ldv, n, d, 0, o + d, ldo, alpha);
    if (d < dim) columns<R, 1>(p, v, ldv, n, d, dim - d, o + d, ldo, alpha);
  }
};

}  // namespace ADA_NS
