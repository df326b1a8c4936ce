// Norms over the last axis, one row a token.
//
//   rms_norm:      out = x / sqrt(mean(x^2) + eps) * weight
//   add_rms_norm:  residual = round(residual + x);  out = rms_norm(residual), the rounded one
//   layer_norm:    out = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias
//
// Arrays: out, x, residual T [num_rows, hidden]; weight, bias T [hidden]. Contiguous, each aligned
// to 16 bytes. No array overlaps another.
//
// Grid: (num_rows). Block: 32 * min(32, ceil(hidden / 256)) threads, one block a row. A row's order
// of summation depends on hidden and the block alone, and the block on hidden alone: a row has the
// same bits in any company. Thread t takes the packs t, t + blockDim.x, ... in turn, then
// block_sum.
//
// Rounding: float throughout, each multiplication and addition rounded (the sum of squares by fused
// multiply-add); the output is rounded to T once.
//
// Rows whose size is a multiple of 16 bytes move in packs of 16 bytes, others by element.
//
// Defines: DTYPE; BIAS = 1 (default) or 0: without it layer_norm has no parameter `bias`.
//
// Cost, bytes a row: 2 hidden sizeof(T) for rms_norm and layer_norm, 4 hidden sizeof(T) for
// add_rms_norm. Bound by memory; a row is read again by the threads that read it before, from L1.
#include "common.cuh"
#include "reduce.cuh"

#ifndef BIAS
#define BIAS 1
#endif
static_assert(BIAS == 0 || BIAS == 1, "BIAS is 0 or 1");

constexpr int MAX_THREADS = 1024;
static_assert(MAX_THREADS == 32 * MAX_WARPS, "block_sum keeps one sum a warp");

__device__ __forceinline__ float inverse_root(float sum, int hidden, float eps) {
  const float mean = __fdiv_rn(sum, float(hidden));
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
}

template <int N>
__device__ __forceinline__ float sum_of_squares(Pack<T, N> pack, float sum) {
#pragma unroll
  for (int j = 0; j < N; ++j) sum = __fmaf_rn(to_float(pack.at[j]), to_float(pack.at[j]), sum);
  return sum;
}

// out = row * scale * weight. `row` is read after the block's barrier, by the threads that read or
// wrote it before.
template <int N>
__device__ __forceinline__ void scale_row(T* out, const T* row, const T* weight, float scale,
                                          int hidden) {
#pragma unroll 1
  for (int i = threadIdx.x; i < hidden / N; i += blockDim.x) {
    const Pack<T, N> x = load_pack<N>(row, i);
    const Pack<T, N> w = load_pack<N>(weight, i);
    Pack<T, N> y;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      y.at[j] = round_to<T>(__fmul_rn(__fmul_rn(to_float(x.at[j]), scale), to_float(w.at[j])));
    }
    store_pack<N>(out, i, y);
  }
}

template <int N>
__device__ __forceinline__ void rms_norm_row(T* out, const T* row, const T* weight, int hidden,
                                             float eps, float* partial) {
  float sum = 0.0f;
#pragma unroll 1
  for (int i = threadIdx.x; i < hidden / N; i += blockDim.x) {
    sum = sum_of_squares<N>(load_pack<N>(row, i), sum);
  }
  const float scale = inverse_root(block_sum(sum, partial), hidden, eps);
  scale_row<N>(out, row, weight, scale, hidden);
}

template <int N>
__device__ __forceinline__ void add_rms_norm_row(T* out, T* residual, const T* row, const T* weight,
                                                 int hidden, float eps, float* partial) {
  float sum = 0.0f;
#pragma unroll 1
  for (int i = threadIdx.x; i < hidden / N; i += blockDim.x) {
    const Pack<T, N> x = load_pack<N>(row, i);
    Pack<T, N> r = load_pack<N>(residual, i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      r.at[j] = round_to<T>(__fadd_rn(to_float(r.at[j]), to_float(x.at[j])));
    }
    store_pack<N>(residual, i, r);
    sum = sum_of_squares<N>(r, sum);
  }
  const float scale = inverse_root(block_sum(sum, partial), hidden, eps);
  scale_row<N>(out, residual, weight, scale, hidden);
}

template <int N>
__device__ __forceinline__ void layer_norm_row(T* out, const T* row, const T* weight, const T* bias,
                                               int hidden, float eps, float* partial,
                                               float* partial_squares) {
  float sum = 0.0f;
#pragma unroll 1
  for (int i = threadIdx.x; i < hidden / N; i += blockDim.x) {
    const Pack<T, N> x = load_pack<N>(row, i);
#pragma unroll
    for (int j = 0; j < N; ++j) sum = __fadd_rn(sum, to_float(x.at[j]));
  }
  const float mean = __fdiv_rn(block_sum(sum, partial), float(hidden));
  float squares = 0.0f;
#pragma unroll 1
  for (int i = threadIdx.x; i < hidden / N; i += blockDim.x) {
    const Pack<T, N> x = load_pack<N>(row, i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float centred = __fsub_rn(to_float(x.at[j]), mean);
      squares = __fmaf_rn(centred, centred, squares);
    }
  }
  const float scale = inverse_root(block_sum(squares, partial_squares), hidden, eps);
#pragma unroll 1
  for (int i = threadIdx.x; i < hidden / N; i += blockDim.x) {
    const Pack<T, N> x = load_pack<N>(row, i);
    const Pack<T, N> w = load_pack<N>(weight, i);
    Pack<T, N> y;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float unit = __fmul_rn(__fsub_rn(to_float(x.at[j]), mean), scale);
      float value = __fmul_rn(unit, to_float(w.at[j]));
      if constexpr (BIAS == 1) value = __fadd_rn(value, to_float(load_pack<N>(bias, i).at[j]));
      y.at[j] = round_to<T>(value);
    }
    store_pack<N>(out, i, y);
  }
}

extern "C" __global__ __launch_bounds__(MAX_THREADS) void rms_norm(
    T* __restrict__ out,           // [num_rows, hidden]
    const T* __restrict__ x,       // [num_rows, hidden]
    const T* __restrict__ weight,  // [hidden]
    int hidden,
    float eps) {
  __shared__ float partial[MAX_WARPS];
  const long long start = (long long)blockIdx.x * hidden;
  if (rows_are_aligned<T>(hidden)) {
    rms_norm_row<WIDEST<T>>(out + start, x + start, weight, hidden, eps, partial);
  } else {
    rms_norm_row<1>(out + start, x + start, weight, hidden, eps, partial);
  }
}

extern "C" __global__ __launch_bounds__(MAX_THREADS) void add_rms_norm(
    T* __restrict__ out,           // [num_rows, hidden]
    T* __restrict__ residual,      // [num_rows, hidden], x is added to it
    const T* __restrict__ x,       // [num_rows, hidden]
    const T* __restrict__ weight,  // [hidden]
    int hidden,
    float eps) {
  __shared__ float partial[MAX_WARPS];
  const long long start = (long long)blockIdx.x * hidden;
  if (rows_are_aligned<T>(hidden)) {
    add_rms_norm_row<WIDEST<T>>(out + start, residual + start, x + start, weight, hidden, eps,
                                partial);
  } else {
    add_rms_norm_row<1>(out + start, residual + start, x + start, weight, hidden, eps, partial);
  }
}

extern "C" __global__ __launch_bounds__(MAX_THREADS) void layer_norm(
    T* __restrict__ out,           // [num_rows, hidden]
    const T* __restrict__ x,       // [num_rows, hidden]
    const T* __restrict__ weight,  // [hidden]
#if BIAS
    const T* __restrict__ bias,  // [hidden]
#endif
    int hidden,
    float eps) {
#if !BIAS
  const T* bias = nullptr;
#endif
  __shared__ float partial[MAX_WARPS];
  __shared__ float partial_squares[MAX_WARPS];
  const long long start = (long long)blockIdx.x * hidden;
  if (rows_are_aligned<T>(hidden)) {
    layer_norm_row<WIDEST<T>>(out + start, x + start, weight, bias, hidden, eps, partial,
                              partial_squares);
  } else {
    layer_norm_row<1>(out + start, x + start, weight, bias, hidden, eps, partial, partial_squares);
  }
}

/* check -DDTYPE=f32
rows, hidden, eps = 3, 1030, 1e-5  # rows of no whole number of packs
block = (160,)
x, r, weight, bias = normal(rows, hidden), normal(rows, hidden), normal(hidden), normal(hidden)

def rms(x):
    x = np.float64(x)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight

out = empty(rows, hidden)
rms_norm((rows,), block, (out, x, weight, np.int32(hidden), np.float32(eps)))
expect(out, rms(x))

out, total = empty(rows, hidden), r + x
add_rms_norm((rows,), block, (out, r, x, weight, np.int32(hidden), np.float32(eps)))
expect(r, total, tolerance=0)
expect(out, rms(total))

out, centred = empty(rows, hidden), x - np.float64(x).mean(-1, keepdims=True)
layer_norm((rows,), block, (out, x, weight, bias, np.int32(hidden), np.float32(eps)))
expect(out, centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias)
*/

/* check -DDTYPE=bf16 -DBIAS=0
rows, hidden, eps = 2, 512, 1e-6
block = (64,)
x, weight = normal(rows, hidden), normal(hidden)
wide = np.float64(x)
out = empty(rows, hidden)
rms_norm((rows,), block, (out, x, weight, np.int32(hidden), np.float32(eps)))
expect(out, wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * np.float64(weight))

out, centred = empty(rows, hidden), wide - wide.mean(-1, keepdims=True)
layer_norm((rows,), block, (out, x, weight, np.int32(hidden), np.float32(eps)))
expect(out, centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * np.float64(weight))
*/
