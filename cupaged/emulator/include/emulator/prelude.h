// Included before every kernel file: the part of the CUDA language that needs no #include.
#pragma once

#include <cassert>
#include <cstdio>
#include <cstring>
#include <type_traits>

// Without the special functions of C++17, half of what would be compiled before every kernel.
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#include <cmath>

#ifdef EMULATOR_CHECKED
// Calls that compilers make of structure copies go through the checks too.
extern "C" {
void* memcpy(void*, const void*, std::size_t) noexcept __asm__("emulator_memcpy");
void* memmove(void*, const void*, std::size_t) noexcept __asm__("emulator_memmove");
void* memset(void*, int, std::size_t) noexcept __asm__("emulator_memset");
}
#endif

#define CUPAGED_EMULATED 1
#define __CUDACC__ 1
#define __CUDACC_RTC__ 1
#define __CUDA_ARCH__ 900

#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __inline_hint__ inline
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define __maxnreg__(n)

#define threadIdx (::emulator::as_uint3(::emulator::thread_index()))
#define blockIdx (::emulator::as_uint3(::emulator::block_index()))
#define blockDim (::emulator::as_dim3(::emulator::block_size()))
#define gridDim (::emulator::as_dim3(::emulator::grid_size()))
#define warpSize 32

#include "emulator/core.h"
#include "emulator/vector_types.h"

namespace emulator {

__forceinline__ uint3 as_uint3(Index3 i) { return uint3{i.x, i.y, i.z}; }
__forceinline__ dim3 as_dim3(Index3 i) { return dim3(i.x, i.y, i.z); }

}  // namespace emulator

inline void __syncthreads(emulator::Place place = EMULATOR_HERE) {
  emulator::block_barrier("__syncthreads", 0, place, emulator::BarrierOp::none);
}
inline int __syncthreads_count(int predicate, emulator::Place place = EMULATOR_HERE) {
  return emulator::block_barrier("__syncthreads_count", predicate, place,
                                 emulator::BarrierOp::count);
}
inline int __syncthreads_and(int predicate, emulator::Place place = EMULATOR_HERE) {
  return emulator::block_barrier("__syncthreads_and", predicate, place, emulator::BarrierOp::all);
}
inline int __syncthreads_or(int predicate, emulator::Place place = EMULATOR_HERE) {
  return emulator::block_barrier("__syncthreads_or", predicate, place, emulator::BarrierOp::any);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, emulator::Place place = EMULATOR_HERE) {
  emulator::warp_barrier(mask, place);
}

#include "emulator/math.h"
#include "emulator/intrinsics.h"
#include "emulator/output.h"
#include "emulator/atomics.h"
#include "emulator/warp.h"
#include "emulator/registry.h"

// What the host's headers define and a compiler for GPUs does not.
#undef INFINITY
#undef NAN
#undef HUGE_VAL
#undef HUGE_VALF
#undef HUGE_VALL
