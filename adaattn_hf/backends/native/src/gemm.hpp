// The register tile: C[rows, NR] (+)= A[rows, K] * B[K, NR]. A lies row by row; B lies in panels of NR columns in which
// the elements that one instruction multiplies together (1 for float32, 2 for bfloat16, 4 for int8) are neighbours.
#pragma once
#include "vec.hpp"

namespace ADA_NS {

struct F32 {
  typedef float elem;
  static constexpr int STEP = 1;
  static constexpr int EXP_DEGREE = 5;
};
struct BF16 {
  typedef uint16_t elem;
  static constexpr int STEP = 2;
  static constexpr int EXP_DEGREE = 3;
};

enum Init { ZERO, ADD, SCALE };  // C starts at 0, at itself, at itself times alpha[row]

template <int ROWS, int INIT>
ADA_INLINE void start(vf (&acc)[ROWS][NV], const float *c, int64_t ldc, const float *alpha) {
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      if (INIT == ZERO) acc[i][j] = vf{};
      else if (INIT == ADD) acc[i][j] = load(c + i * ldc + j * W);
      else acc[i][j] = load(c + i * ldc + j * W) * splat(alpha[i]);
    }
}

template <int ROWS, int INIT>
ADA_NOINLINE void tile(F32, const float *a, int64_t lda, const float *b, int64_t steps, float *c, int64_t ldc,
                       const float *alpha) {
  vf acc[ROWS][NV];
  start<ROWS, INIT>(acc, c, ldc, alpha);
  for (int64_t k = 0; k < steps; ++k, b += NR) {
    vf bv[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) bv[j] = load(b + j * W);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
      vf av = splat(a[i * lda + k]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[i][j] += av * bv[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) store(c + i * ldc + j * W, acc[i][j]);
}

#ifdef ADA_HAS_BF16
struct __attribute__((packed, may_alias)) Pair {
  uint16_t x[2];
};
// The broadcast is part of the instruction: compilers would give it an instruction and a register of its own, and fewer
// products would then fit into the processor's window.
template <int ROWS, int INIT>
ADA_NOINLINE void tile(BF16, const uint16_t *a, int64_t lda, const uint16_t *b, int64_t steps, float *c, int64_t ldc,
                       const float *alpha) {
  vf acc[ROWS][NV];
  start<ROWS, INIT>(acc, c, ldc, alpha);
  for (int64_t k = 0; k < steps; ++k, b += NR * 2) {
    __m512i bv[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) bv[j] = _mm512_loadu_si512(b + j * W * 2);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
      const Pair *pair = (const Pair *)(a + i * lda + k * 2);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j)
        asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc[i][j]) : "v"(bv[j]), "m"(*pair));
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) store(c + i * ldc + j * W, acc[i][j]);
}
#endif

template <class T, int INIT>
ADA_INLINE void strip(int64_t rows, const typename T::elem *a, int64_t lda, const typename T::elem *b, int64_t steps,
                      float *c, int64_t ldc, const float *alpha) {
  switch (rows) {
    case 1: return tile<1, INIT>(T{}, a, lda, b, steps, c, ldc, alpha);
    case 2: return tile<2, INIT>(T{}, a, lda, b, steps, c, ldc, alpha);
    case 3: return tile<3, INIT>(T{}, a, lda, b, steps, c, ldc, alpha);
    case 4: return tile<4, INIT>(T{}, a, lda, b, steps, c, ldc, alpha);
#if defined(__AVX2__) || defined(__aarch64__)
    case 5: return tile<5, INIT>(T{}, a, lda, b, steps, c, ldc, alpha);
    default: return tile<6, INIT>(T{}, a, lda, b, steps, c, ldc, alpha);
#endif
  }
}

// The next run of set bits as columns [c0, c1) of panels; the run is cleared.
ADA_INLINE bool next_run(uint64_t &bits, int64_t &c0, int64_t &c1) {
  if (!bits) return false;
  int a = __builtin_ctzll(bits);
  uint64_t rest = ~(bits >> a);
  int n = rest ? __builtin_ctzll(rest) : 64;
  if (a + n >= 64) n = 64 - a, bits = 0;
  else bits &= ~(((1ull << n) - 1) << a);
  c0 = a * NR;
  c1 = (a + n) * NR;
  return true;
}

}  // namespace ADA_NS
