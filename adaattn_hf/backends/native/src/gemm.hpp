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

// Query rows of a strip: what one register tile computes.
template <class T> constexpr int64_t STRIP = MR;
#ifdef ADA_HAS_AMX
template <> constexpr int64_t STRIP<BF16> = 12;  // of the 16 that a tile register has room for: two strips are a task's rows
#endif

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

#ifdef ADA_HAS_AMX
// Tile registers of one matrix product: 0 and 1 hold C, 2 holds A, 3 and 4 hold B, 16 pairs of rows at a time.
ADA_INLINE void open_tiles() {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int t = 0; t < 5; ++t) {
    config.bytes[t] = 64;
    config.rows[t] = t < 3 ? STRIP<BF16> : 16;
  }
  _tile_loadconfig(&config);
}
ADA_INLINE void close_tiles() { _tile_release(); }

template <int INIT>
ADA_NOINLINE void wide_tile(const uint16_t *a, int64_t lda, const uint16_t *b, int64_t steps, float *c, int64_t ldc,
                            const float *alpha) {
  constexpr int ROWS = STRIP<BF16>;
  static_assert(NV == 2 && ROWS == 2 * MR, "two registers hold a row of C, and two tiles without them a strip");
  const int64_t blocks = steps / 16, rest = steps % 16;
  if (!blocks) {
    tile<MR, INIT>(BF16{}, a, lda, b, steps, c, ldc, alpha);
    tile<MR, INIT>(BF16{}, a + MR * lda, lda, b, steps, c + MR * ldc, ldc, INIT == SCALE ? alpha + MR : alpha);
    return;
  }
  if (INIT == SCALE)
    for (int i = 0; i < ROWS; ++i)
      for (int j = 0; j < NV; ++j) store(c + i * ldc + j * W, load(c + i * ldc + j * W) * splat(alpha[i]));
  asm volatile("" ::: "memory");  // the tile instructions read and write behind the compiler's back
  if (INIT == ZERO) {
    _tile_zero(0);
    _tile_zero(1);
  } else {
    _tile_loadd(0, c, ldc * 4);
    _tile_loadd(1, c + W, ldc * 4);
  }
  for (int64_t k = 0; k < blocks; ++k, a += 32, b += 16 * NR * 2) {
    _tile_loadd(2, a, lda * 2);
    _tile_loadd(3, b, NR * 4);
    _tile_dpbf16ps(0, 2, 3);
    _tile_loadd(4, b + W * 2, NR * 4);
    _tile_dpbf16ps(1, 2, 4);
  }
  _tile_stored(0, c, ldc * 4);
  _tile_stored(1, c + W, ldc * 4);
  asm volatile("" ::: "memory");
  if (!rest) return;
  tile<MR, ADD>(BF16{}, a, lda, b, rest, c, ldc, nullptr);
  tile<MR, ADD>(BF16{}, a + MR * lda, lda, b, rest, c + MR * ldc, ldc, nullptr);
}
#else
ADA_INLINE void open_tiles() {}
ADA_INLINE void close_tiles() {}
#endif

template <class T, int INIT>
ADA_INLINE void strip(int64_t rows, const typename T::elem *a, int64_t lda, const typename T::elem *b, int64_t steps,
                      float *c, int64_t ldc, const float *alpha) {
#ifdef ADA_HAS_AMX
  if constexpr (T::STEP == 2) {
    if (rows == STRIP<T>) return wide_tile<INIT>(a, lda, b, steps, c, ldc, alpha);
    if (rows > MR) {
      tile<MR, INIT>(T{}, a, lda, b, steps, c, ldc, alpha);
      a += MR * lda, c += MR * ldc, rows -= MR;
      if (INIT == SCALE) alpha += MR;
    }
  }
#endif
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
