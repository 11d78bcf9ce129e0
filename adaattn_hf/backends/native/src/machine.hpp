// What this machine has: the kernels of its instruction sets, threads to share, and memory that is kept between calls.
// For the dispatcher alone.
#pragma once
#include <atomic>
#include <cstdlib>
#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif
#include "plan.hpp"

namespace {

ada_parallel_fn g_parallel = nullptr;

// Whether the processor multiplies tiles of bfloat16, and the system lets this process use their registers: Linux gives
// them to who asks (Documentation/arch/x86/xstate.rst), and some sandboxes do not.
bool tiles_allowed() {
#if defined(__x86_64__) && defined(__linux__) && defined(SYS_arch_prctl)
  static const bool allowed = [] {
    unsigned a, b, c, d;
    constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (BF16 | TILE)) != (BF16 | TILE)) return false;
    constexpr long ASK = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
  }();
  return allowed;
#else
  return false;
#endif
}

const AdaKernels *kernels(int64_t level) {
  switch (level) {
    case ADA_PORTABLE: return ada_kernels_portable();
#if defined(__x86_64__)
    case ADA_AVX2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? ada_kernels_avx2() : nullptr;
    case ADA_AVX512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
                 ? ada_kernels_avx512()
                 : nullptr;
    case ADA_AVX512_BF16:
      return kernels(ADA_AVX512) && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")
                 ? ada_kernels_avx512_bf16()
                 : nullptr;
    case ADA_AMX: return kernels(ADA_AVX512_BF16) && tiles_allowed() ? ada_kernels_amx() : nullptr;
#endif
#if defined(__aarch64__)
    case ADA_NEON: return ada_kernels_neon();
#endif
    default: return nullptr;
  }
}

int64_t best_level() {
  static const int64_t best = [] {
    constexpr int64_t order[] = {ADA_AMX, ADA_AVX512_BF16, ADA_AVX512, ADA_AVX2, ADA_NEON};
    for (int64_t l : order)
      if (kernels(l)) return l;
    return (int64_t)ADA_PORTABLE;
  }();
  return best;
}

constexpr size_t KEEP = size_t(48) << 20;  // a thread keeps at most this much memory between calls

std::atomic<int64_t> g_used{0}, g_peak{0};  // bytes that calls in progress work with, and the most of them

// Memory that grows and is kept: page faults of a fresh allocation would cost more than a small call.
struct Buffer {
  char *data = nullptr;
  size_t size = 0;
  int64_t used = 0;
  ~Buffer() {
    count(0);
    std::free(data);
  }
  void count(size_t bytes) {
    const int64_t more = static_cast<int64_t>(bytes) - used, now = g_used.fetch_add(more, std::memory_order_relaxed) + more;
    used += more;
    for (int64_t top = g_peak.load(std::memory_order_relaxed); now > top && !g_peak.compare_exchange_weak(top, now);) {
    }
  }
  char *get(size_t bytes) {
    count(bytes);
    if (bytes > size) {
      std::free(data);
      size = (bytes + 4095) / 4096 * 4096;
      data = static_cast<char *>(std::aligned_alloc(4096, size));
      if (!data) size = 0;
    }
    return data;
  }
  void done() {
    count(0);
    if (size > KEEP) {
      std::free(data);
      data = nullptr;
      size = 0;
    }
  }
};
thread_local Buffer t_scratch, t_pack, t_own, t_units;

}  // namespace
