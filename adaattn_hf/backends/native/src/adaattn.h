// The C interface of the library. Every field is eight bytes wide, so that a caller can lay the structure out with a
// plain array of 64-bit words. Strides count elements, not bytes. Nothing here refers to any Python or torch type.
#pragma once
#include <stdint.h>

#define ADA_ABI_VERSION 5

// ADA_I4: two values of a byte, odd numbers 2 n - 15 of the four bits n; of 32 channels those from the 16th on lie in the
// high halves of 16 bytes. ADA_U8F: eight bits of a positive float, exponent 5 (bias 20) and fraction 3.
enum ada_dtype { ADA_F32 = 0, ADA_BF16 = 1, ADA_F16 = 2, ADA_I8 = 3, ADA_I4 = 4, ADA_U8F = 5 };
enum ada_compute { ADA_EXACT = 0, ADA_COMPUTE_BF16 = 1, ADA_COMPUTE_I8 = 2 };
enum ada_level { ADA_PORTABLE = 0, ADA_AVX2 = 1, ADA_AVX512 = 2, ADA_AVX512_BF16 = 3, ADA_NEON = 4, ADA_AMX = 5 };

// Runs fn(data) on several threads and returns when all of them are done: the signature of GOMP_parallel, which
// libgomp, libomp and libiomp5 all export.
typedef void (*ada_parallel_fn)(void (*fn)(void *), void *data, unsigned threads, unsigned flags);

struct ada_args {
  // [batch, heads, len, dim] by strides; key/value may be int8 with one scale per token and head, values of such keys
  // four bits (strides count bytes then)
  const void *q, *k, *v;
  void *out;
  float *lse;  // contiguous [batch, q_heads, q_len], natural logarithm, may be null
  int64_t q_dtype, kv_dtype, v_dtype;  // v_dtype: kv_dtype, or ADA_I4 beside ADA_I8
  int64_t batch, q_heads, kv_heads, q_len, kv_len, dim, dim_v;
  int64_t qs[4], ks[4], vs[4], os[4];
  double scaling;
  int64_t threads, level;  // level < 0: the best that this machine has
  // what queries see: rows of (batch_row, q_start, q_len, k_start, k_len, offset); null: every batch row is one segment with `offset`
  const int64_t *segments;
  int64_t n_segments, offset;
  int64_t causal, window, sinks;  // window < 0: none
  const uint8_t *mask;            // 0 = invisible
  int64_t ms[4];
  // precision of the products, and per key/value head a narrower window (< 0: none) with sinks of its own, which count
  // where the call has no window itself; null: all heads alike
  int64_t compute;
  const int64_t *head_windows, *head_sinks;
  // what changes scores
  double softcap;                            // 0: none
  const float *sink_logits;                  // per query head, null: none
  const void *bias;                          // added to the scaled (and capped) scores
  int64_t bias_dtype, bs[4];
  const void *k_scale, *v_scale;  // [batch, kv_heads, kv_len] by strides, for int8 key/value
  int64_t scale_dtype;             // ADA_F32 or ADA_U8F
  int64_t kss[3], vss[3];
  // fp32 [batch, kv_heads, dim], contiguous: the first stored key as it came, which draws much of the weight; null: none
  const float *first_key;
  int64_t rotated;                 // stored keys (bit 0), values (bit 1) are those of vectors turned by `rotate`
  const float *key_mean;  // [batch, kv_heads, dim], taken off the keys before rounding to int8; null: nothing
  int64_t key_mean_row;   // from one batch row to the next; 0: one mean for all
  // backward only
  const void *dout;
  int64_t gs[4];
  void *dq, *dk, *dv;
  int64_t dqs[4], dks[4], dvs[4];
  float *dbias;  // [batch, q_heads, q_len, kv_len] by strides, float32
  int64_t dbs[4];
};

// Rounding of tokens on their way into a cache.
struct ada_store_args {
  const void *x;  // [batch, heads, n, dim] by strides
  void *codes;    // int8 [batch, heads, n, dim], or ADA_I4 with half the bytes; the last extent contiguous
  uint8_t *scale;     // ADA_U8F [batch, heads, n] by strides
  const float *mean;  // [batch, heads, dim], contiguous, taken off first (after turning); null: nothing
  int64_t x_dtype, code_dtype, rotated;
  int64_t batch, heads, n, dim;
  int64_t xs[4], cs[4], ss[3];
  int64_t threads, level;
  // [batch, heads, dim], contiguous, of length 1: the direction along which a token's errors cancel (ADA_I8); null: none
  const float *along;
};

#ifdef __cplusplus
extern "C" {
#endif
int64_t ada_store_size(void);
// 0 or an error, see `ada_forward`
int64_t ada_store(const struct ada_store_args *args);
int64_t ada_abi_version(void);
int64_t ada_args_size(void);
int64_t ada_best_level(void);
int64_t ada_has_level(int64_t level);
int64_t ada_peak_bytes(int64_t reset);
void ada_set_parallel(ada_parallel_fn fn);
// 0, or a negative number: -1 bad arguments, -2 out of memory, -3 level (or int8 products at that level) not available
int64_t ada_forward(const struct ada_args *args);
int64_t ada_backward(const struct ada_args *args);
#ifdef __cplusplus
}
#endif
