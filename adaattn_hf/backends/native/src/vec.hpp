// Vectors of one instruction set, on GCC/Clang vector extensions. ADA_NS names the instruction set's namespace.
#pragma once
#include <math.h>
#include <stddef.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#include "plan.hpp"

#define ADA_INLINE static inline __attribute__((always_inline))
#define ADA_NOINLINE static __attribute__((noinline))

namespace ADA_NS {

#if defined(__AVX512F__)
constexpr int W = 16, NV = 2, MR = 6;
#elif defined(__AVX2__)
constexpr int W = 8, NV = 2, MR = 6;
#elif defined(__aarch64__)
constexpr int W = 4, NV = 4, MR = 6;
#else
constexpr int W = 4, NV = 4, MR = 2;
#endif
constexpr int NR = W * NV;
static_assert(ADA_KEYS / NR <= 64, "the panels of a tile are the bits of a word");
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define ADA_HAS_BF16 1
#endif
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && ADA_HAS_BF16
#define ADA_HAS_AMX 1
#endif

typedef float vf __attribute__((vector_size(W * 4), may_alias));
typedef uint32_t vi __attribute__((vector_size(W * 4), may_alias));
typedef float vfu __attribute__((vector_size(W * 4), aligned(4), may_alias));

template <class T> ADA_INLINE T lesser(T a, T b) { return a < b ? a : b; }
template <class T> ADA_INLINE T greater(T a, T b) { return a > b ? a : b; }
ADA_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

ADA_INLINE vf load(const float *p) { return *(const vfu *)p; }
ADA_INLINE void store(float *p, vf x) { *(vfu *)p = x; }
ADA_INLINE vf splat(float x) { return x - vf{}; }
ADA_INLINE vi splat_i(uint32_t x) { return x - vi{}; }

ADA_INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

ADA_INLINE float hmax(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float m = x[0];
  for (int i = 1; i < W; ++i) m = greater(m, x[i]);
  return m;
#endif
}

ADA_INLINE float hsum(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float s = 0;
  for (int i = 0; i < W; ++i) s += x[i];
  return s;
#endif
}

// 2^x for x <= 0; -inf gives exactly 0. Minimax fits of 2^r on [0, 1] with 2^0 = 1 exactly: the relative error is 1e-7
// at DEGREE 5 and 9e-5 at DEGREE 3, which is enough before a rounding to bfloat16 (2e-3).
template <int DEGREE> ADA_INLINE vf exp2_neg(vf x) {
#if defined(__AVX512F__)
  vf r = (vf)_mm512_reduce_ps((__m512)x, 0x09);  // x - floor(x); 0 for -inf
#else
  x = vmax(splat(-126.5f), x);  // in this order NaN stays NaN
  const vf magic = splat(12582912.0f);
  vf t = (x - splat(0.5f)) + magic;  // floor(x), or one less where x is an integer: then r is 1
  vf r = x - (t - magic);
#endif
  vf p;
  if constexpr (DEGREE == 3) {
    p = splat(7.706704364e-2f) * r + splat(2.276449889e-1f);
    p = p * r + splat(6.951167872e-1f);
  } else {
    p = splat(1.867131478e-3f) * r + splat(9.017024660e-3f);
    p = p * r + splat(5.579992042e-2f);
    p = p * r + splat(2.401644466e-1f);
    p = p * r + splat(6.931513124e-1f);
  }
  p = p * r + splat(1.0f);
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);  // p * 2^floor(x)
#else
  vi e = ((vi)t << 23) + splat_i(127u << 23);  // the clamp ends at -127, a zero exponent and so exactly 0
  return p * (vf)e;
#endif
}

// tanh, to 2e-7: by the exponential, near 0 by the odd polynomial of Cephes' tanhf (Moshier).
ADA_INLINE vf vtanh(vf x) {
  const vf a = (vf)((vi)x & splat_i(0x7fffffffu)), e = exp2_neg<5>(a * splat(-2.885390082f));  // e^-2|x|
  const vf far = (splat(1.0f) - e) / (splat(1.0f) + e), z = a * a;
  vf p = splat(-5.70498872745e-3f) * z + splat(2.06390887954e-2f);
  p = p * z + splat(-5.37397155531e-2f);
  p = p * z + splat(1.33314422036e-1f);
  p = p * z + splat(-3.33332819422e-1f);
  const vf t = a < splat(0.625f) ? a + a * z * p : far;
  return (vf)((vi)t | ((vi)x & splat_i(0x80000000u)));
}

// Of n numbers that adjoin, `each` makes W at a time others; the last few are made beside zeros.
template <class Each> ADA_INLINE void for_vectors(float *s, int64_t n, Each each) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(s + i, each(load(s + i)));
  if (i < n) {
    float rest[W] = {};
    memcpy(rest, s + i, (size_t)(n - i) * 4);
    store(rest, each(load(rest)));
    memcpy(s + i, rest, (size_t)(n - i) * 4);
  }
}

// Lane i of the result is the largest element (the sum) of v[i]: one tree for W vectors in place of W trees.
#if defined(__AVX512F__)
template <class Op> ADA_INLINE __m512 reduce_lanes(const __m512 *v, Op op) {
  __m512 a[8], b[4], c[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    a[i] = op(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = op(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    c[i] = op(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88), _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
  return op(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}
ADA_INLINE vf lanes_sum(const vf *v) {
  return (vf)reduce_lanes((const __m512 *)v, [](__m512 x, __m512 y) { return _mm512_add_ps(x, y); });
}
ADA_INLINE __m512i lanes_sum(const __m512i *v) {
  return _mm512_castps_si512(reduce_lanes((const __m512 *)v, [](__m512 x, __m512 y) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_castps_si512(y)));
  }));
}
ADA_INLINE vf lanes_max(const vf *v) {
  return (vf)reduce_lanes((const __m512 *)v, [](__m512 x, __m512 y) { return _mm512_max_ps(x, y); });
}
#else
ADA_INLINE vf lanes_sum(const vf *v) {
  vf r;
  for (int i = 0; i < W; ++i) r[i] = hsum(v[i]);
  return r;
}
ADA_INLINE vf lanes_max(const vf *v) {
  vf r;
  for (int i = 0; i < W; ++i) r[i] = hmax(v[i]);
  return r;
}
#endif

ADA_INLINE float from_bf16(uint16_t x) {
  uint32_t u = (uint32_t)x << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
ADA_INLINE uint16_t to_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  uint32_t nan = (u & 0x7fffffffu) > 0x7f800000u;
  uint32_t r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (uint16_t)(nan ? 0x7fc0u : r);
}
ADA_INLINE float from_f16(uint16_t h) {
  // exponent re-bias by multiplication keeps subnormals right; infinities and NaN are patched
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, em = (uint32_t)(h & 0x7fffu) << 13;
  float f;
  memcpy(&f, &em, 4);
  f *= 5.192296858534828e33f;  // 2^112
  uint32_t u;
  memcpy(&u, &f, 4);
  u = (h & 0x7c00u) == 0x7c00u ? (em | 0x7f800000u) : u;
  u |= sign;
  memcpy(&f, &u, 4);
  return f;
}
ADA_INLINE uint16_t to_f16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  uint32_t sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
  if (a < 0x38800000u) {  // subnormal in half precision: let float addition round at the right place
    float m, magic = 0.5f;
    memcpy(&m, &a, 4);
    m += magic;
    uint32_t mu, gu;
    memcpy(&mu, &m, 4);
    memcpy(&gu, &magic, 4);
    return (uint16_t)(sign | (mu - gu));
  }
  uint32_t odd = (a >> 13) & 1u;
  return (uint16_t)(sign | ((a - 0x38000000u + 0xfffu + odd) >> 13));
}

ADA_INLINE float load_any(const void *p, int64_t dtype, int64_t i) {
  if (dtype == ADA_F32) return ((const float *)p)[i];
  if (dtype == ADA_BF16) return from_bf16(((const uint16_t *)p)[i]);
  if (dtype == ADA_F16) return from_f16(((const uint16_t *)p)[i]);
  return (float)((const int8_t *)p)[i];
}
ADA_INLINE void store_any(void *p, int64_t dtype, int64_t i, float x) {
  if (dtype == ADA_F32) ((float *)p)[i] = x;
  else if (dtype == ADA_BF16) ((uint16_t *)p)[i] = to_bf16(x);
  else ((uint16_t *)p)[i] = to_f16(x);
}

}  // namespace ADA_NS
