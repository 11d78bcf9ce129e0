// Compiled once for every instruction set, with ADA_NS (namespace) and ADA_TABLE (the function that returns its table).
#ifdef ADA_ABSENT  // the compiler does not know this instruction set
#include "plan.hpp"
const AdaKernels *ADA_TABLE() { return nullptr; }
#else
#include "forward.hpp"

namespace ADA_NS {

static void shape(const ada_args &a, AdaShape &sh) {
#ifdef ADA_HAS_BF16
  if (sh.compute == ADA_BF16) return shape_of<BF16>(a, sh);
#endif
  sh.compute = ADA_F32;
  shape_of<F32>(a, sh);
}

static void pack(const ada_args &a, const AdaShape &sh, const AdaUnit &u, int64_t tile, char *scratch) {
#ifdef ADA_HAS_BF16
  if (sh.compute == ADA_BF16) return pack_tile<BF16>(a, sh, u, tile, scratch);
#endif
  pack_tile<F32>(a, sh, u, tile, scratch);
}

static void forward(const ada_args &a, const AdaShape &sh, const AdaUnit &u, int64_t task, char *scratch) {
#ifdef ADA_HAS_BF16
  if (sh.compute == ADA_BF16) return forward_tile<BF16>(a, sh, u, task, scratch);
#endif
  forward_tile<F32>(a, sh, u, task, scratch);
}

static const AdaKernels table = {NR, shape, pack, forward, nullptr, nullptr, nullptr};

}  // namespace ADA_NS

const AdaKernels *ADA_TABLE() { return &ADA_NS::table; }
#endif
