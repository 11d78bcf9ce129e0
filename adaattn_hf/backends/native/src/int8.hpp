// Products in int8: queries, keys and values are rounded with one scale per token, weights with one scale per row and
// tile, so that no row's result depends on a key that it does not see.
#pragma once
#include "pack.hpp"

namespace ADA_NS {

#ifdef ADA_HAS_BF16  // this level has VNNI as well
struct I8 {
  typedef uint8_t elem;  // left operands are unsigned, packed right operands signed
  static constexpr int STEP = 4;
  static constexpr int EXP_DEGREE = 3;
};

template <int ROWS>
ADA_INLINE void multiply(__m512i (&acc)[ROWS][NV], const uint8_t *a, int64_t lda, const uint8_t *b, int64_t steps) {
  for (int64_t k = 0; k < steps; ++k, b += NR * 4) {
    __m512i bv[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) bv[j] = _mm512_loadu_si512(b + j * W * 4);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
      int32_t four;
      memcpy(&four, a + i * lda + k * 4, 4);
      __m512i av = _mm512_set1_epi32(four);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[i][j] = _mm512_dpbusd_epi32(acc[i][j], av, bv[j]);
    }
  }
}

// s = (a . b + start) * key_scale * row_scale + row_shift
template <int ROWS>
static void score_tile(const uint8_t *a, int64_t lda, const uint8_t *b, int64_t steps, float *s, int64_t lds,
                       const int32_t *start, const float *key_scale, const float *row_scale, const float *row_shift) {
  __m512i acc[ROWS][NV];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) acc[i][j] = _mm512_loadu_si512(start + j * W);
  multiply<ROWS>(acc, a, lda, b, steps);
#pragma GCC unroll 4
  for (int j = 0; j < NV; ++j) {
    const vf scale = load(key_scale + j * W);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
      store(s + i * lds + j * W,
            (vf)_mm512_cvtepi32_ps(acc[i][j]) * scale * splat(row_scale[i]) + splat(row_shift[i]));
  }
}

// o = o * alpha + (a . b) * factor
template <int ROWS, int INIT>
static void value_tile(const uint8_t *a, int64_t lda, const uint8_t *b, int64_t steps, float *o, int64_t ldo,
                       const float *alpha, const float *factor) {
  __m512i acc[ROWS][NV];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) acc[i][j] = _mm512_setzero_si512();
  multiply<ROWS>(acc, a, lda, b, steps);
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      float *y = o + i * ldo + j * W;
      vf x = (vf)_mm512_cvtepi32_ps(acc[i][j]) * splat(factor[i]);
      if (INIT == ADD) x += load(y);
      if (INIT == SCALE) x += load(y) * splat(alpha[i]);
      store(y, x);
    }
}

ADA_INLINE void strip_scores(int64_t rows, const uint8_t *a, int64_t lda, const uint8_t *b, int64_t steps, float *s,
                             int64_t lds, const int32_t *start, const float *ks, const float *rs, const float *shift) {
  switch (rows) {
    case 1: return score_tile<1>(a, lda, b, steps, s, lds, start, ks, rs, shift);
    case 2: return score_tile<2>(a, lda, b, steps, s, lds, start, ks, rs, shift);
    case 3: return score_tile<3>(a, lda, b, steps, s, lds, start, ks, rs, shift);
    case 4: return score_tile<4>(a, lda, b, steps, s, lds, start, ks, rs, shift);
    case 5: return score_tile<5>(a, lda, b, steps, s, lds, start, ks, rs, shift);
    default: return score_tile<6>(a, lda, b, steps, s, lds, start, ks, rs, shift);
  }
}

template <int INIT>
ADA_INLINE void strip_values(int64_t rows, const uint8_t *a, int64_t lda, const uint8_t *b, int64_t steps, float *o,
                             int64_t ldo, const float *alpha, const float *f) {
  switch (rows) {
    case 1: return value_tile<1, INIT>(a, lda, b, steps, o, ldo, alpha, f);
    case 2: return value_tile<2, INIT>(a, lda, b, steps, o, ldo, alpha, f);
    case 3: return value_tile<3, INIT>(a, lda, b, steps, o, ldo, alpha, f);
    case 4: return value_tile<4, INIT>(a, lda, b, steps, o, ldo, alpha, f);
    case 5: return value_tile<5, INIT>(a, lda, b, steps, o, ldo, alpha, f);
    default: return value_tile<6, INIT>(a, lda, b, steps, o, ldo, alpha, f);
  }
}

// Rounds n floats to signed bytes plus `bias`, zero-padded (before the bias) to `padded`; returns the scale.
ADA_INLINE float round_row(uint8_t *to, const float *x, int64_t n, int64_t padded, int bias, int32_t *sum) {
  float peak = 0;
  for (int64_t i = 0; i < n; ++i) peak = greater(peak, fabsf(x[i]));
  const float scale = peak > 0 ? peak / 127.0f : 1.0f, inverse = 1.0f / scale;
  int32_t total = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t v = (int32_t)lesser(greater(rintf(x[i] * inverse), -127.0f), 127.0f);
    total += v;
    to[i] = (uint8_t)(v + bias);
  }
  for (int64_t i = n; i < padded; ++i) to[i] = (uint8_t)bias;
  if (sum) *sum = total;
  return scale;
}

#endif

}  // namespace ADA_NS
