// How a weight W [out_features, in_features] lies on the device, for gemm and for embedding.
//
// It has rows = out_features rounded up to 16 and stride = in_features rounded up to 64 columns;
// what was added is zeros.
//
// f32: row by row.
// f16 and bf16: in blocks of 16 rows and 32 columns, as the tensor cores take them (see ptx.cuh for
// the layout of A). A block is 1,024 bytes: two products of 32 lanes of 16 bytes each. Of product
// s, lane 4 g + t has columns 8 t + 4 s .. 8 t + 4 s + 3 of rows g and g + 8, in this order:
//
//   row g: + 0, + 1;   row g + 8: + 0, + 1;   row g: + 2, + 3;   row g + 8: + 2, + 3
//
// The blocks of the same rows follow one another by ascending columns. So a warp reads 512 bytes in
// one piece and has a product's A in its registers; and the 16 bytes at columns 8 t .. 8 t + 7 of a
// row of x, as they lie in memory, are lane t's part of B for both products.
#pragma once

#include "common.cuh"

constexpr int STEP = 32;      // columns of a block
constexpr int GRANULE = 64;   // `stride` is a multiple of it
constexpr int BLOCK_ROWS = 16;
constexpr int LANE_ELEMENTS = 8;             // of a product, 16 bytes
constexpr int PRODUCT = 32 * LANE_ELEMENTS;  // elements of W

// Where the elements at `row` and columns `column`, column + 1 lie. `column` is even; 16-bit types.
__device__ __forceinline__ long long packed_pair(int row, int column, int stride) {
  const int lane = row % 8 * 4 + column % STEP / 8;
  const int product = column % 8 / 4;
  const int word = column % 4 + row % BLOCK_ROWS / 8;  // of two elements
  const long long rows = (long long)(row / BLOCK_ROWS) * BLOCK_ROWS * stride;
  return rows + column / STEP * (2 * PRODUCT) + product * PRODUCT + lane * LANE_ELEMENTS + word * 2;
}
