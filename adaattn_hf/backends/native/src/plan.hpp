// What the dispatcher and the kernels of every instruction set share: plain data only, so that no function that was
// compiled for one instruction set can be linked in place of another's.
#pragma once
#include "adaattn.h"

struct AdaUnit {  // one segment and one key/value head
  int64_t row, head, q0, qn, k0, kn, offset;
  int64_t window, sinks;
  char *pack;         // packed keys and values of this unit, of the tiles from `from` on
  int64_t tiles;      // key tiles
  int64_t from, to;   // those that are walked now
  float *state;       // where not all are walked at once: maximum and sum of each row so far; its output lies in `out`
  int64_t pitch;      // keys that a packed tile has room for
  int64_t k_bytes;    // packed bytes of the keys of a tile
  int64_t tile_bytes; // of keys, values and scales together
  int64_t heads_per;  // query heads folded into one row tile
  int64_t row_tiles;  // row tiles per head group
  int64_t first_task, tasks;
  int64_t split, splits;  // decode: keys per part and number of parts
  float *partial;
};

struct AdaShape {
  int64_t compute;         // the arithmetic in use: ADA_F32, ADA_BF16 or ADA_I8
  int64_t group;           // query heads per key/value head
  int64_t dk, dv;          // padded head sizes as packed
  int64_t k_size, v_size;  // packed bytes of one key and of one value
  int64_t extra;           // bytes of a tile beside these
  int64_t scratch;         // bytes of working memory one thread needs
  int64_t rows;            // query rows of one tile
};

struct AdaKernels {
  int64_t few;  // most query rows per key/value head that `decode` takes
  void (*shape)(const ada_args &, AdaShape &);
  void (*pack)(const ada_args &, const AdaShape &, const AdaUnit &, int64_t tile, char *scratch);
  void (*forward)(const ada_args &, const AdaShape &, const AdaUnit &, int64_t task, char *scratch);
  int64_t (*decode_scratch)(const ada_args &, const AdaShape &);
  void (*decode)(const ada_args &, const AdaShape &, const AdaUnit &, int64_t part, char *scratch);
  void (*merge)(const ada_args &, const AdaShape &, const AdaUnit &, char *scratch);
  void (*store)(const ada_store_args &, int64_t row, float *scratch);
  int64_t (*backward_scratch)(const ada_args &, const AdaShape &, int64_t q_len, int64_t kv_len);
  void (*backward)(const ada_args &, const AdaShape &, const AdaUnit &, char *scratch);
};

constexpr int64_t ADA_KEYS = 768;  // keys per tile

const AdaKernels *ada_kernels_portable();
const AdaKernels *ada_kernels_avx2();
const AdaKernels *ada_kernels_avx512();
const AdaKernels *ada_kernels_avx512_bf16();
const AdaKernels *ada_kernels_neon();
const AdaKernels *ada_kernels_amx();
