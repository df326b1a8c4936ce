// The kernels for x86 processors with AVX2 and FMA.
#include "kernels.h"

#if defined(__x86_64__)
namespace {
// Runs on every processor, so that it comes before what does not.
bool is_supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
}  // namespace

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#define KERNELS avx2
#define LANES 8
namespace avx2 {
constexpr int kRegisters = 16, kMostRows = 6;
}

#include "kernels.inc"

const Kernels kernels_of_avx2 = KERNEL_TABLE("avx2", is_supported);

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
