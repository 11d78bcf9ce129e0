// Products in int8: queries, keys and values are rounded with one scale per token, weights with one scale per row and
// group of keys: a key that draws most of the weight must not push what its far neighbours get below the last bit.
#pragma once
#include "gemm.hpp"

namespace ADA_NS {

#ifdef ADA_HAS_BF16  // this level has VNNI as well
struct I8 {
  typedef uint8_t elem;  // left operands are unsigned, packed right operands signed
  static constexpr int STEP = 4;
  static constexpr int EXP_DEGREE = 3;
};
constexpr int64_t GROUP = 64, GROUPS = ADA_KEYS / GROUP;  // keys of one scale, scales of a row in a tile
static_assert(GROUPS <= W && GROUP == 4 * W, "the scales of a row fit into a vector, a group into four");

// The instruction is spelled out because GCC copies every sum before it adds to it.
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
      for (int j = 0; j < NV; ++j) asm("vpdpbusd %2, %1, %0" : "+v"(acc[i][j]) : "v"(av), "v"(bv[j]));
    }
  }
}

// s = (a . b + start) * key_scale * row_scale + row_shift
template <int ROWS>
ADA_NOINLINE void score_tile(const uint8_t *a, int64_t lda, const uint8_t *b, int64_t steps, float *s, int64_t lds,
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

// o = o * alpha + (a . b) * factor, with a factor for every row and group; the first key is the first'th of its group.
template <int ROWS, int INIT>
ADA_NOINLINE void value_tile(const uint8_t *a, int64_t lda, const uint8_t *b, int64_t first, int64_t keys, float *o,
                             int64_t ldo, const float *alpha, const float *factor) {
  vf sum[ROWS][NV];
  start<ROWS, INIT>(sum, o, ldo, alpha);
  for (int64_t end = GROUP - first; keys > 0; end = GROUP, ++factor) {
    const int64_t steps = (lesser(end, keys) + 3) / 4;
    __m512i acc[ROWS][NV];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[i][j] = _mm512_setzero_si512();
    multiply<ROWS>(acc, a, lda, b, steps);
    a += steps * 4;
    b += steps * 4 * NR;
    keys -= steps * 4;
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
      const vf f = splat(factor[i * W]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) sum[i][j] += (vf)_mm512_cvtepi32_ps(acc[i][j]) * f;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) store(o + i * ldo + j * W, sum[i][j]);
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
ADA_INLINE void strip_values(int64_t rows, const uint8_t *a, int64_t lda, const uint8_t *b, int64_t first, int64_t keys,
                             float *o, int64_t ldo, const float *alpha, const float *f) {
  switch (rows) {
    case 1: return value_tile<1, INIT>(a, lda, b, first, keys, o, ldo, alpha, f);
    case 2: return value_tile<2, INIT>(a, lda, b, first, keys, o, ldo, alpha, f);
    case 3: return value_tile<3, INIT>(a, lda, b, first, keys, o, ldo, alpha, f);
    case 4: return value_tile<4, INIT>(a, lda, b, first, keys, o, ldo, alpha, f);
    case 5: return value_tile<5, INIT>(a, lda, b, first, keys, o, ldo, alpha, f);
    default: return value_tile<6, INIT>(a, lda, b, first, keys, o, ldo, alpha, f);
  }
}

// Rounds n floats to signed bytes plus `bias`, zero-padded (before the bias) to `padded`; returns the scale, which is NaN
// where a float is NaN or infinite.
ADA_INLINE float round_row(uint8_t *to, const float *x, int64_t n, int64_t padded, int bias, int32_t *sum) {
  const auto part = [&](int64_t i) { return (__mmask16)(n - i >= W ? 0xffff : n > i ? (1u << (n - i)) - 1 : 0); };
  __m512 top = _mm512_setzero_ps(), broken = top;
  for (int64_t i = 0; i < n; i += W) {
    const __m512 y = _mm512_maskz_loadu_ps(part(i), x + i);
    top = _mm512_max_ps(top, _mm512_abs_ps(y));
    broken = _mm512_fmadd_ps(y, _mm512_setzero_ps(), broken);  // 0, or NaN
  }
  const float peak = _mm512_reduce_max_ps(top), scale = (peak > 0 ? peak / 127.0f : 1.0f) + _mm512_reduce_add_ps(broken);
  const __m512 inverse = _mm512_set1_ps(1.0f / scale);
  __m512i total = _mm512_setzero_si512();
  for (int64_t i = 0; i < padded; i += W) {
    const __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(part(i), x + i), inverse));
    total = _mm512_add_epi32(total, v);
    const __mmask16 room = (__mmask16)(padded - i >= W ? 0xffff : (1u << (padded - i)) - 1);
    _mm_mask_storeu_epi8(to + i, room, _mm512_cvtepi32_epi8(_mm512_add_epi32(v, _mm512_set1_epi32(bias))));
  }
  if (sum) *sum = _mm512_reduce_add_epi32(total);
  return scale;
}

#endif

}  // namespace ADA_NS
