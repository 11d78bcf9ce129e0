// Packing of keys and values into panels: once per tile of keys and key/value head, shared by every query.
#pragma once
#include "gemm.hpp"

namespace ADA_NS {

// dst[0..n) = src row converted to the arithmetic's element type, zero-padded to `padded`
template <class T>
static void convert_row(typename T::elem *dst, const void *src, int64_t dtype, int64_t at, int64_t stride, int64_t n,
                        int64_t padded) {
  typedef typename T::elem elem;
  constexpr bool half = sizeof(elem) == 2;
  if (stride == 1 && !half && dtype == ADA_F32) {
    memcpy(dst, (const float *)src + at, (size_t)n * 4);
  } else if (stride == 1 && half && dtype == ADA_BF16) {
    memcpy(dst, (const uint16_t *)src + at, (size_t)n * 2);
  } else if (stride == 1 && !half && dtype == ADA_BF16) {
    const uint16_t *s = (const uint16_t *)src + at;
    for (int64_t i = 0; i < n; ++i) dst[i] = (elem)from_bf16(s[i]);
  } else if (stride == 1 && half && dtype == ADA_F32) {
    const float *s = (const float *)src + at;
    for (int64_t i = 0; i < n; ++i) dst[i] = (elem)to_bf16(s[i]);
  } else if (stride == 1 && !half && dtype == ADA_F16) {
    const uint16_t *s = (const uint16_t *)src + at;
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
      _mm256_storeu_ps((float *)dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(s + i))));
#endif
    for (; i < n; ++i) dst[i] = (elem)from_f16(s[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) {
      float x = load_any(src, dtype, at + i * stride);
      if constexpr (half) dst[i] = to_bf16(x);
      else dst[i] = x;
    }
  }
  for (int64_t i = n; i < padded; ++i) dst[i] = 0;
}

#if defined(__AVX512F__)
// dst[c * NR + r] = src[r * ld + c], 16 x 16 words of 32 bits; the caller has at least 16 rows and columns
ADA_INLINE void transpose16(const uint32_t *src, int64_t ld, uint32_t *dst, int64_t ldd) {
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(src + i * ld);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_si512(dst + (i)*ldd, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
    _mm512_storeu_si512(dst + (i + 4) * ldd, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
    _mm512_storeu_si512(dst + (i + 8) * ldd, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    _mm512_storeu_si512(dst + (i + 12) * ldd, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
  }
}
#endif

// dst[c * NR + r] = src[r * ld + c] for r < NR, c < cols, in words of 32 bits
static void transpose_panel(const uint32_t *src, int64_t ld, int64_t cols, uint32_t *dst) {
  int64_t c = 0;
#if defined(__AVX512F__)
  for (; c + 16 <= cols; c += 16)
    for (int r = 0; r < NR; r += 16) transpose16(src + r * ld + c, ld, dst + c * NR + r, NR);
#endif
  for (; c < cols; ++c)
    for (int r = 0; r < NR; ++r) memcpy(dst + c * NR + r, (const char *)src + (r * ld + c) * 4, 4);  // any alignment
}

// Rows become columns: panel[k / STEP][row][k % STEP] for NR rows of `n` elements (keys for the score product).
template <class T>
static void pack_transposed(typename T::elem *dst, const void *src, int64_t dtype, int64_t at, int64_t row_stride,
                            int64_t stride, int64_t rows, int64_t n, int64_t padded, typename T::elem *stage) {
  typedef typename T::elem elem;
  const uint32_t *words;
  int64_t ld = padded * (int64_t)sizeof(elem) / 4;
  const bool same = (sizeof(elem) == 4 && dtype == ADA_F32) || (sizeof(elem) == 2 && dtype == ADA_BF16);
  if (same && stride == 1 && n == padded && rows >= NR && (row_stride * (int64_t)sizeof(elem)) % 4 == 0) {
    words = (const uint32_t *)((const elem *)src + at);
    ld = row_stride * (int64_t)sizeof(elem) / 4;
  } else {
    for (int64_t r = 0; r < NR; ++r) {
      if (r < rows) convert_row<T>(stage + r * padded, src, dtype, at + r * row_stride, stride, n, padded);
      else memset(stage + r * padded, 0, (size_t)padded * sizeof(elem));
    }
    words = (const uint32_t *)stage;
  }
  transpose_panel(words, ld, padded * (int64_t)sizeof(elem) / 4, (uint32_t *)dst);
}

// Rows stay rows: for every panel of NR columns, panel[row / STEP][column][row % STEP] (values for the output product).
// Panels lie `panel_rows * NR` elements apart; rows beyond `rows` are zero up to a multiple of STEP.
template <class T>
static void pack_rows(typename T::elem *dst, int64_t panel_rows, const void *src, int64_t dtype, int64_t at,
                      int64_t row_stride, int64_t stride, int64_t rows, int64_t n, int64_t padded,
                      typename T::elem *stage) {
  constexpr int S = T::STEP;
  typedef typename T::elem elem;
  constexpr int64_t native = sizeof(elem) == 4 ? ADA_F32 : ADA_BF16;
  const bool direct = dtype == native && stride == 1 && n == padded;
  for (int64_t r = 0; r < rows; r += S) {
    const elem *from = stage;
    int64_t apart = padded;
    if (direct && r + S <= rows) {
      from = (const elem *)src + at + r * row_stride;
      apart = row_stride;
    } else for (int s = 0; s < S; ++s) {
      if (r + s < rows) convert_row<T>(stage + s * padded, src, dtype, at + (r + s) * row_stride, stride, n, padded);
      else memset(stage + s * padded, 0, (size_t)padded * sizeof(elem));
    }
    for (int64_t c = 0; c < padded; c += NR) {
      elem *d = dst + c * panel_rows + r * NR;
      const elem *x = from + c;
      if constexpr (S == 1) {
        memcpy(d, x, NR * sizeof(elem));
      } else {
#if defined(__AVX512BW__)
        __m512i a = _mm512_loadu_si512(x), b = _mm512_loadu_si512(x + apart);
        const __m512i lo = _mm512_set_epi64(0x002f000f002e000e, 0x002d000d002c000c, 0x002b000b002a000a,
                                            0x0029000900280008, 0x0027000700260006, 0x0025000500240004,
                                            0x0023000300220002, 0x0021000100200000);
        const __m512i hi = _mm512_add_epi16(lo, _mm512_set1_epi16(16));
        _mm512_storeu_si512(d, _mm512_permutex2var_epi16(a, lo, b));
        _mm512_storeu_si512(d + 32, _mm512_permutex2var_epi16(a, hi, b));
#else
        for (int i = 0; i < NR; ++i)
          for (int s = 0; s < S; ++s) d[i * S + s] = x[s * apart + i];
#endif
      }
    }
  }
}

}  // namespace ADA_NS
