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

}  // namespace ADA_NS
