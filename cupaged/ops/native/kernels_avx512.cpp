// The kernels for x86 processors with AVX-512.
#include "kernels.h"

#if defined(__x86_64__)
namespace {
// Runs on every processor, so that it comes before what does not.
bool is_supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
}  // namespace

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")
#endif

#define KERNELS avx512
#define LANES 16
namespace avx512 {
constexpr int kRegisters = 32, kMostRows = 12;
}

#include "kernels.inc"

const Kernels kernels_of_avx512 = KERNEL_TABLE("avx512", is_supported);

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
