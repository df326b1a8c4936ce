// Types that every kernel shares: the storage type T, its conversion to and from float, and packs
// of elements that one instruction moves. Rounding, everywhere: read T, compute in float, round
// once (to nearest, ties to even) at the output.
//
// Arithmetic that a kernel's contract fixes is written with __fadd_rn, __fmul_rn, __fmaf_rn and the
// like; everything is compiled with --fmad=false, so nothing else is contracted either.
//
// Define: DTYPE = f32 | f16 | bf16, the storage type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef DTYPE
#error "define DTYPE as f32, f16 or bf16"
#endif

using f32 = float;
using f16 = __half;
using bf16 = __nv_bfloat16;
using T = DTYPE;

template <class U>
constexpr bool IS_STORAGE_TYPE = false;
template <>
constexpr bool IS_STORAGE_TYPE<f32> = true;
template <>
constexpr bool IS_STORAGE_TYPE<f16> = true;
template <>
constexpr bool IS_STORAGE_TYPE<bf16> = true;
static_assert(IS_STORAGE_TYPE<T>, "DTYPE is f32, f16 or bf16");

__device__ __forceinline__ float to_float(f32 value) { return value; }
__device__ __forceinline__ float to_float(f16 value) { return __half2float(value); }
__device__ __forceinline__ float to_float(bf16 value) { return __bfloat162float(value); }

// round_to<T>(x): to nearest, ties to even; too large becomes inf.
template <class U>
__device__ __forceinline__ U round_to(float value);
template <>
__device__ __forceinline__ f32 round_to<f32>(float value) {
  return value;
}
template <>
__device__ __forceinline__ f16 round_to<f16>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ bf16 round_to<bf16>(float value) {
  return __float2bfloat16_rn(value);
}

// N elements that lie together and are aligned to their common size: one load or store.
template <class U, int N>
struct alignas(N * sizeof(U)) Pack {
  static_assert((N & (N - 1)) == 0 && N * sizeof(U) <= 16, "a power of two, at most 16 bytes");
  U at[N];
};

// Elements in 16 bytes, the widest load there is.
template <class U>
constexpr int WIDEST = 16 / int(sizeof(U));

// Pack number `index` of an array. The array is aligned to a pack.
template <int N, class U>
__device__ __forceinline__ Pack<U, N> load_pack(const U* array, long long index) {
  return reinterpret_cast<const Pack<U, N>*>(array)[index];
}

template <int N, class U>
__device__ __forceinline__ void store_pack(U* array, long long index, const Pack<U, N>& pack) {
  reinterpret_cast<Pack<U, N>*>(array)[index] = pack;
}

// True if rows of `size` elements, one after another in an array aligned to 16 bytes, all begin at
// a multiple of 16 bytes. The same for every thread of a launch.
template <class U>
__device__ __forceinline__ bool rows_are_aligned(long long size) {
  return size % WIDEST<U> == 0;
}
