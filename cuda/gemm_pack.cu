// Puts a weight into the layout of packed_weight.cuh, rounded to T.
//
// Arrays: packed T [rows, stride] in that layout, rows a multiple of 16 and stride of 64; weight
// S [num_rows, num_columns], num_rows at most rows, num_columns at most stride. What lies
// beyond it becomes zeros. Contiguous, each aligned to 16 bytes, apart.
//
// A weight may come in parts of several times 16 rows, each packed by a launch of its own.
//
// Grid: (ceil(rows * stride / V / 256)), V = elements of 16 bytes. Block: 256. A thread writes 16
// bytes. Defines: DTYPE; SOURCE_DTYPE = f32 (default) | f16 | bf16, the type S that the numbers come
// in. Cost: sizeof(S) + sizeof(T) bytes an element; bound by memory, done once.
#include "packed_weight.cuh"

#ifndef SOURCE_DTYPE
#define SOURCE_DTYPE f32
#endif
using S = SOURCE_DTYPE;
static_assert(IS_STORAGE_TYPE<S>, "SOURCE_DTYPE is f32, f16 or bf16");

constexpr int THREADS = 256;

struct Source {
  const S* weight;
  int num_rows;
  int num_columns;

  __device__ __forceinline__ T at(int row, int column) const {
    if (row >= num_rows || column >= num_columns) return round_to<T>(0.0f);
    return round_to<T>(to_float(weight[(long long)row * num_columns + column]));
  }
};

extern "C" __global__ __launch_bounds__(THREADS) void pack_weight(
    T* __restrict__ packed,        // [rows, stride], packed
    const S* __restrict__ weight,  // [num_rows, num_columns]
    int rows,
    int stride,
    int num_rows,
    int num_columns) {
  const long long index = (long long)blockIdx.x * THREADS + threadIdx.x;
  const long long packs_a_row = stride / WIDEST<T>;
  if (index >= rows * packs_a_row) return;
  const Source source = {weight, num_rows, num_columns};
  Pack<T, WIDEST<T>> pack;
  if constexpr (sizeof(T) == 4) {
    const int row = index / packs_a_row;
    const int column = index % packs_a_row * WIDEST<T>;
#pragma unroll
    for (int j = 0; j < WIDEST<T>; ++j) pack.at[j] = source.at(row, column + j);
  } else {
    const int lane = index % 32;
    const int product = index / 32 % 2;
    const int block = index / 64 % (stride / STEP);
    const int row = index / 64 / (stride / STEP) * BLOCK_ROWS + lane / 4;
    const int column = block * STEP + lane % 4 * 8 + product * 4;
#pragma unroll
    for (int j = 0; j < WIDEST<T>; ++j) {
      pack.at[j] = source.at(row + j / 2 % 2 * 8, column + j / 4 * 2 + j % 2);
    }
  }
  store_pack<WIDEST<T>>(packed, index, pack);
}

/* check -DDTYPE=bf16
weight = np.float32(normal(20, 33))
packed = empty(32, 64)
sizes = np.int32(32), np.int32(64), np.int32(20), np.int32(33)
pack_weight((1,), (256,), (packed, weight, *sizes))
padded = np.zeros((32, 64), np.float32)
padded[:20, :33] = weight
# From [rows / 16, half, g, blocks, t, product, pair, 2] to
# [rows / 16, blocks, product, g, t, pair, half, 2].
parts = padded.reshape(2, 2, 8, 2, 4, 2, 2, 2).transpose(0, 3, 5, 2, 4, 6, 1, 7)
expect(packed, parts.reshape(32, 64), tolerance=0)
*/
