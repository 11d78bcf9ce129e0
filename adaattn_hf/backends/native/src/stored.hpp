// Keys and values as a cache stores them: int8 (values: four bits, too) with one scale per token and head.
#pragma once
#include "rows.hpp"

namespace ADA_NS {

// A positive float of eight bits: its exponent and fraction are moved to where a float32 has them.
ADA_INLINE float from_u8f(uint8_t x) {
  const uint32_t bits = ((uint32_t)x << 20) + (107u << 23);
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

// The same the other way, not below x.
ADA_INLINE uint8_t to_u8f(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const int64_t code = ((int64_t)bits - (107ll << 23) + (1 << 20) - 1) >> 20;
  return (uint8_t)lesser((int64_t)255, greater((int64_t)0, code));
}

// Turns a vector by the orthogonal, symmetric Hadamard matrix; blockwise where n is not a power of two: the blocks are
// as large as the largest power of two that divides n. Outliers of single channels are spread over all of them.
ADA_INLINE void rotate(float *x, int64_t n) {
  const int64_t block = n & -n;
  const float f = 1.0f / sqrtf((float)block);
  for (int64_t h = 1; h < block; h *= 2)
    for (int64_t i = 0; i < n; i += 2 * h)
      for (int64_t j = i; j < i + h; ++j) {
        const float a = x[j], b = x[j + h];
        x[j] = a + b;
        x[j + h] = a - b;
      }
  for (int64_t i = 0; i < n; ++i) x[i] *= f;
}

// Moves up to three codes to their other neighbour, so that `error` (codes less what they stand for, in steps) cancels
// along `p`; the definition is `attention.stored.cancelled`.
ADA_INLINE void cancel(int8_t *codes, float *error, const float *p, int64_t n) {
  const float weight = 0.5f * (float)n;
  for (int64_t turn = 0; turn < 3; ++turn) {
    float off = 0, least = 0;
    for (int64_t d = 0; d < n; ++d) off += error[d] * p[d];
    int64_t at = -1;
    for (int64_t d = 0; d < n; ++d) {
      const float sign = error[d] > 0 ? 1.0f : -1.0f, rest = off - sign * p[d];
      const float cost = weight * (rest * rest - off * off) + 1 - 2 * fabsf(error[d]);
      if (cost < least && fabsf((float)codes[d] - sign) <= 127) least = cost, at = d;
    }
    if (at < 0) return;
    const float sign = error[at] > 0 ? 1.0f : -1.0f;
    codes[at] = (int8_t)((float)codes[at] - sign);
    error[at] -= sign;
  }
}

// Rounds one token of one head; `scratch` has room for a head.
static void store_row(const ada_store_args &a, int64_t row, float *x) {
  const int64_t t = row % a.n, h = row / a.n % a.heads, b = row / a.n / a.heads;
  const int64_t at = b * a.xs[0] + h * a.xs[1] + t * a.xs[2];
  if (a.x_dtype == ADA_F32 && a.xs[3] == 1) memcpy(x, (const float *)a.x + at, (size_t)a.dim * 4);
  else
    for (int64_t d = 0; d < a.dim; ++d) x[d] = load_any(a.x, a.x_dtype, at + d * a.xs[3]);
  if (a.rotated) rotate(x, a.dim);
  if (a.mean)
    for (int64_t d = 0; d < a.dim; ++d) x[d] -= a.mean[(b * a.heads + h) * a.dim + d];
  float peak = 0;
  for (int64_t d = 0; d < a.dim; ++d) peak = greater(peak, fabsf(x[d]));
  const bool halves = a.code_dtype == ADA_I4;
  const uint8_t code = to_u8f(peak * (halves ? 1.0f / 15 : 1.0f / 127));
  const float inverse = 1.0f / from_u8f(code);
  a.scale[b * a.ss[0] + h * a.ss[1] + t * a.ss[2]] = code;
  int8_t *to = (int8_t *)a.codes + b * a.cs[0] + h * a.cs[1] + t * a.cs[2];
  if (!halves) {
    for (int64_t d = 0; d < a.dim; ++d) {
      // what is no number becomes the least code: the conversion of any other is not defined
      const float y = nearbyintf(x[d] * inverse), code = y > 127 ? 127 : y >= -127 ? y : -127;
      to[d] = (int8_t)code;
      x[d] = code - x[d] * inverse;
    }
    if (a.along) cancel(to, x, a.along + (b * a.heads + h) * a.dim, a.dim);
    return;
  }
  for (int64_t d = 0; d < a.dim; ++d) {
    const float y = nearbyintf((x[d] * inverse + 15) * 0.5f);
    x[d] = y > 15 ? 15 : y >= 0 ? y : 0;
  }
  for (int64_t d = 0; d < a.dim; d += 32)
    for (int64_t i = 0; i < 16; ++i) to[d / 2 + i] = (int8_t)(uint8_t)((int)x[d + i] | (int)x[d + 16 + i] << 4);
}

// The scales of n tokens from `at` on, as float32.
ADA_INLINE void read_scales(float *to, const void *scale, int64_t dtype, int64_t at, int64_t stride, int64_t n) {
  if (dtype == ADA_U8F && stride == 1) {
    const uint8_t *p = (const uint8_t *)scale + at;
    for (int64_t j = 0; j < n; ++j) to[j] = from_u8f(p[j]);
  } else if (dtype == ADA_U8F) {
    for (int64_t j = 0; j < n; ++j) to[j] = from_u8f(((const uint8_t *)scale)[at + j * stride]);
  } else {
    for (int64_t j = 0; j < n; ++j) to[j] = ((const float *)scale)[at + j * stride];
  }
}
ADA_INLINE void key_scales(float *to, const ada_args &a, const AdaUnit &u, int64_t key, int64_t n) {
  read_scales(to, a.k_scale, a.scale_dtype, u.row * a.kss[0] + u.head * a.kss[1] + key * a.kss[2], a.kss[2], n);
}
ADA_INLINE void value_scales(float *to, const ada_args &a, const AdaUnit &u, int64_t key, int64_t n) {
  read_scales(to, a.v_scale, a.scale_dtype, u.row * a.vss[0] + u.head * a.vss[1] + key * a.vss[2], a.vss[2], n);
}

// Keys [key, key + n) of a unit as contiguous float32 rows, the mean put back.
static void widen_keys(float *to, const ada_args &a, const AdaUnit &u, int64_t key, int64_t n) {
  float scale[NR];
  const float *mean = mean_of(a, u);
  key_scales(scale, a, u, key, n);
  for (int64_t r = 0; r < n; ++r, to += a.dim) {
    if (a.first_key && key + r == 0) {
      memcpy(to, a.first_key + (u.row * a.kv_heads + u.head) * a.dim, (size_t)a.dim * 4);
      continue;
    }
    const int8_t *x = (const int8_t *)a.k + u.row * a.ks[0] + u.head * a.ks[1] + (key + r) * a.ks[2];
    if (a.ks[3] == 1)
      for (int64_t d = 0; d < a.dim; ++d) to[d] = (float)x[d] * scale[r];
    else
      for (int64_t d = 0; d < a.dim; ++d) to[d] = (float)x[d * a.ks[3]] * scale[r];
    if (mean)
      for (int64_t d = 0; d < a.dim; ++d) to[d] += mean[d];
    if (a.rotated & 1) rotate(to, a.dim);
  }
}

// The same of values.
static void widen_values(float *to, const ada_args &a, const AdaUnit &u, int64_t key, int64_t n) {
  float scale[NR];
  value_scales(scale, a, u, key, n);
  for (int64_t r = 0; r < n; ++r, to += a.dim_v) {
    const int8_t *x = (const int8_t *)a.v + u.row * a.vs[0] + u.head * a.vs[1] + (key + r) * a.vs[2];
    if (a.v_dtype == ADA_I4) {
      for (int64_t d = 0; d < a.dim_v; d += 32)
        for (int64_t i = 0; i < 16; ++i) {
          const int32_t pair = (uint8_t)x[d / 2 + i];
          to[d + i] = (float)(2 * (pair & 15) - 15) * scale[r];
          to[d + 16 + i] = (float)(2 * (pair >> 4) - 15) * scale[r];
        }
    } else {
      for (int64_t d = 0; d < a.dim_v; ++d) to[d] = (float)x[d * a.vs[3]] * scale[r];
    }
    if (a.rotated & 2) rotate(to, a.dim_v);
  }
}

}  // namespace ADA_NS
