// What the kernels of y = x W^T (+ b) share: the order of summation, the products, the sums of a
// tile's chunks by several blocks, the output. See gemm_rows.cu and gemm_tiles.cu.
//
// The order of summation is the same in every kernel, so that an output has the same bits whichever
// kernel computed it and whatever rows came with it. The columns of W, padded with zeros to
// `stride`, are cut into chunks of `chunk` columns, the last one maybe shorter. The sum of a chunk
// starts from zero and walks its columns in steps of 32, ascending. The sums of the chunks are
// added in ascending order, then the bias; all in float. The result is rounded once.
//
// A step of 16-bit numbers is two products on the tensor cores, as packed_weight.cuh cuts it: the
// columns 8 t .. 8 t + 3 of every t go into the first, 8 t + 4 .. 8 t + 7 into the second.
// A step of f32 is one fused multiply-add after another, column by column.
//
// Defines: DTYPE, of x and W. OUT_DTYPE = f32 | f16 | bf16, of y; DTYPE unless given. BIAS = 0
// (default) or 1: with it the kernels have the parameter `bias`.
#pragma once

#include "common.cuh"
#include "packed_weight.cuh"
#include "ptx.cuh"

#ifndef OUT_DTYPE
#define OUT_DTYPE DTYPE
#endif
#ifndef BIAS
#define BIAS 0
#endif

using Out = OUT_DTYPE;
static_assert(IS_STORAGE_TYPE<Out>, "OUT_DTYPE is f32, f16 or bf16");
static_assert(BIAS == 0 || BIAS == 1, "BIAS is 0 or 1");

template <class U>
constexpr bool IS_BF16 = false;
template <>
constexpr bool IS_BF16<bf16> = true;
constexpr bool IS_F32 = sizeof(T) == 4;

// What sums of chunks are added to: -0.0 + s has the bits of s, also for zeros.
constexpr float NOTHING = -0.0f;

// What a launch computes.
struct Problem {
  Out* out;           // [num_tokens, out_features]
  const T* x;         // [num_tokens, in_features]
  const T* weight;    // [out_features rounded up to 16, stride], packed
  const float* bias;  // [out_features]; null without BIAS
  int num_tokens;
  int out_features;
  int in_features;
  int stride;
  int chunk;  // a multiple of GRANULE, as stride is
};

// 16 bytes of a row of x, zeros beyond its end. `column` is a multiple of a pack. ALIGNED: rows
// begin and end at multiples of 16 bytes.
template <bool ALIGNED>
__device__ __forceinline__ uint4 load_x(const T* row, int column, int in_features) {
  if constexpr (ALIGNED) {
    if (column >= in_features) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4*>(row + column);
  } else {
    Pack<T, WIDEST<T>> pack;
#pragma unroll
    for (int j = 0; j < WIDEST<T>; ++j) {
      pack.at[j] = column + j < in_features ? row[column + j] : round_to<T>(0.0f);
    }
    return *reinterpret_cast<const uint4*>(&pack);
  }
}

// c += one product. weight: a lane's 16 bytes of W. x: its 8 bytes of token g; see ptx.cuh for g
// and the layout of c: rows are output features, columns are tokens.
__device__ __forceinline__ void multiply(float (&c)[4], const uint4& weight, unsigned x0,
                                         unsigned x1) {
  const unsigned a[4] = {weight.x, weight.y, weight.z, weight.w};
  const unsigned b[2] = {x0, x1};
  if constexpr (IS_BF16<T>) {
    mma_bf16(c, a, b);
  } else {
    mma_f16(c, a, b);
  }
}

// One output, if it exists: the bias is added and the sum rounded.
__device__ __forceinline__ void store_output(const Problem& problem, int token, int feature,
                                             float sum) {
  if (token >= problem.num_tokens || feature >= problem.out_features) return;
  if constexpr (BIAS == 1) sum = __fadd_rn(sum, problem.bias[feature]);
  problem.out[(long long)token * problem.out_features + feature] = round_to<Out>(sum);
}

// The outputs of a product's c. `feature` and `token` are those of c[0].
__device__ __forceinline__ void store_product(const Problem& problem, int token, int feature,
                                              const float (&c)[4]) {
  store_output(problem, token, feature, c[0]);
  store_output(problem, token + 1, feature, c[1]);
  store_output(problem, token, feature + 8, c[2]);
  store_output(problem, token + 1, feature + 8, c[3]);
}
