// Compiled once for every instruction set, with ADA_NS (namespace) and ADA_TABLE (the function that returns its table).
#ifdef ADA_ABSENT  // the compiler does not know this instruction set
#include "plan.hpp"
const AdaKernels *ADA_TABLE() { return nullptr; }
#else
#include "backward.hpp"
#include "decode.hpp"
#include "forward.hpp"

namespace ADA_NS {

static void shape(const ada_args &a, AdaShape &sh) {
#ifdef ADA_HAS_BF16
  if (sh.compute == ADA_I8) return shape_of<I8>(a, sh);
  if (sh.compute == ADA_BF16) return shape_of<BF16>(a, sh);
#endif
  sh.compute = ADA_F32;
  shape_of<F32>(a, sh);
}

static void pack(const ada_args &a, const AdaShape &sh, const AdaUnit &u, int64_t tile, char *scratch) {
#ifdef ADA_HAS_BF16
  if (sh.compute == ADA_I8) return pack_bytes(a, sh, u, tile, scratch);
  if (sh.compute == ADA_BF16) return pack_tile<BF16>(a, sh, u, tile, scratch);
#endif
  pack_tile<F32>(a, sh, u, tile, scratch);
}

static void forward(const ada_args &a, const AdaShape &sh, const AdaUnit &u, int64_t task, char *scratch) {
#ifdef ADA_HAS_BF16
  if (sh.compute == ADA_I8) return forward_tile<I8>(a, sh, u, task, scratch);
  if (sh.compute == ADA_BF16) return forward_tile<BF16>(a, sh, u, task, scratch);
#endif
  forward_tile<F32>(a, sh, u, task, scratch);
}

// Calls F<policy>(...) with the policy for the types and the arithmetic of a call.
#ifdef ADA_HAS_BF16
#define ADA_FEW_PAIRS(F, ...) \
  if (sh.compute == ADA_BF16 && a.kv_dtype == ADA_BF16) return F<Pairs>(__VA_ARGS__);                            \
  if (a.kv_dtype == ADA_I8 && (a.q_dtype != ADA_F32 || sh.compute == ADA_BF16) && a.dim <= DIM) {                 \
    if (a.v_dtype == ADA_I4) return F<Words<InNibbles>>(__VA_ARGS__);                                             \
    return F<Words<InIntegers>>(__VA_ARGS__);                                                                     \
  }
#else
#define ADA_FEW_PAIRS(F, ...)
#endif
#define ADA_FEW(F, ...)                                          \
  ADA_FEW_PAIRS(F, __VA_ARGS__)                                  \
  switch (a.kv_dtype) {                                          \
    case ADA_BF16: return F<Wide<ADA_BF16>>(__VA_ARGS__);        \
    case ADA_F16: return F<Wide<ADA_F16>>(__VA_ARGS__);          \
    case ADA_I8:                                                 \
      if (a.v_dtype == ADA_I4) return F<Wide<ADA_I8, ADA_I4>>(__VA_ARGS__); \
      return F<Wide<ADA_I8>>(__VA_ARGS__);                       \
    default: return F<Wide<ADA_F32>>(__VA_ARGS__);               \
  }

template <class P> static int64_t few_size(const ada_args &a) {
  Few<P> w;
  return few_layout<P>(w, nullptr, a.dim, a.dim_v);
}

static int64_t decode_scratch(const ada_args &a, const AdaShape &sh) {
  (void)sh;
  ADA_FEW(few_size, a)
}

static void decode(const ada_args &a, const AdaShape &sh, const AdaUnit &u, int64_t part, char *scratch) {
  ADA_FEW(few_rows, a, sh, u, part, scratch)
}

static int64_t backward_scratch(const ada_args &a, const AdaShape &sh, int64_t qn, int64_t kn) {
#ifdef ADA_HAS_BF16
  Back<BF16> b;
  if (sh.compute == ADA_BF16) return back_layout<BF16>(b, nullptr, a, qn, kn);
#endif
  (void)sh;
  Back<F32> f;
  return back_layout<F32>(f, nullptr, a, qn, kn);
}

static void backward(const ada_args &a, const AdaShape &sh, const AdaUnit &u, char *scratch) {
#ifdef ADA_HAS_BF16
  if (sh.compute == ADA_BF16) return backward_unit<BF16>(a, sh, u, scratch);
#endif
  backward_unit<F32>(a, sh, u, scratch);
}

static const AdaKernels table = {FEW,    shape,       pack,             forward, decode_scratch,
                                 decode, merge_parts, store_row,       backward_scratch, backward};

}  // namespace ADA_NS

const AdaKernels *ADA_TABLE() { return &ADA_NS::table; }
#endif
