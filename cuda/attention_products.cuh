// The two products of attention, each over one tile of KV_TILE positions, for all rows of a block.
//
//   add_scores: a warp takes SLICE positions: scores[row, position] += sum over d of q k
//   add_values: a warp takes its tiles of 8 dimensions, number n * WARPS + warp for n = 0, 1, ...:
//               values[row, d] += sum over positions of weight v
//
// Both leave [16, 8] tiles in the layout of C in ptx.cuh, whatever the type. f16 and bf16: mma of
// 16 dimensions, or 16 positions, in ascending order. f32: fused multiply-adds in ascending order.
// A row never depends on the others. Row tiles whose bit in `active` is not set stay as they are.
#pragma once

#include "attention_tiles.cuh"

constexpr int SLICE = KV_TILE / WARPS;
constexpr int SLICE_TILES = SLICE / 8;
constexpr int DIM_TILES = HEAD_DIM / 8;
constexpr int WARP_DIM_TILES = (DIM_TILES + WARPS - 1) / WARPS;

__device__ __forceinline__ bool is_active(unsigned active, int row_tile) {
  return (active >> row_tile & 1) != 0;
}

// The last of a warp's tiles of dimensions may lie beyond the head.
__device__ __forceinline__ bool has_dim_tile(int n) {
  return DIM_TILES % WARPS == 0 || n * WARPS + int(threadIdx.x / 32) < DIM_TILES;
}

__device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                    f16) {
  mma_f16(c, a, b);
}
__device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                    bf16) {
  mma_bf16(c, a, b);
}

// ---- f16 and bf16 -------------------------------------------------------------------------------

template <class U>
__device__ __forceinline__ void add_scores(float (&scores)[ROW_TILES][SLICE_TILES][4],
                                           const U* queries, const U* keys, unsigned active) {
  const int lane = threadIdx.x % 32;
  const int matrix = lane / 8;
  // Keys: matrix 0, 1 are positions 0..7 at dimensions 0..7, 8..15; 2, 3 are positions 8..15.
  const int key = threadIdx.x / 32 * SLICE + matrix / 2 % SLICE_TILES * 8 + lane % 8;
  const U* key_row = keys + key * PITCH + matrix % 2 * 8;
  // Queries: matrix 0, 1 are rows 0..7, 8..15 at dimensions 0..7; 2, 3 are dimensions 8..15.
  const U* query_row = queries + (matrix % 2 * 8 + lane % 8) * PITCH + matrix / 2 * 8;
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += 16) {
    unsigned b[SLICE_TILES][2];
    if constexpr (SLICE_TILES == 2) {
      unsigned both[4];
      ldmatrix_x4(both, key_row + d);
      b[0][0] = both[0];
      b[0][1] = both[1];
      b[1][0] = both[2];
      b[1][1] = both[3];
    } else {
      ldmatrix_x2(b[0], key_row + d);
    }
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      if (!is_active(active, r)) continue;
      unsigned a[4];
      ldmatrix_x4(a, query_row + r * 16 * PITCH + d);
#pragma unroll
      for (int n = 0; n < SLICE_TILES; ++n) mma(scores[r][n], a, b[n], U{});
    }
  }
}

template <class U>
__device__ __forceinline__ void add_values(float (&values)[ROW_TILES][WARP_DIM_TILES][4],
                                           const U* weights, const U* tile, unsigned active) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const U* value_row = tile + lane * PITCH + warp * 8;  // lane: position 0..31
  const U* weight_row = weights + lane % 16 * WEIGHT_PITCH + lane / 16 * 8;
#pragma unroll
  for (int position = 0; position < KV_TILE; position += 32) {
    unsigned b[WARP_DIM_TILES][4];
#pragma unroll
    for (int n = 0; n < WARP_DIM_TILES; ++n) {
      if (has_dim_tile(n)) ldmatrix_x4_trans(b[n], value_row + position * PITCH + n * WARPS * 8);
    }
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      if (!is_active(active, r)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // of 16 positions
        unsigned a[4];
        ldmatrix_x4(a, weight_row + r * 16 * WEIGHT_PITCH + position + half * 16);
#pragma unroll
        for (int n = 0; n < WARP_DIM_TILES; ++n) {
          const unsigned pair[2] = {b[n][2 * half], b[n][2 * half + 1]};
          if (has_dim_tile(n)) mma(values[r][n], a, pair, U{});
        }
      }
    }
  }
}

// ---- f32 ----------------------------------------------------------------------------------------

__device__ __forceinline__ void add_scores(float (&scores)[ROW_TILES][SLICE_TILES][4],
                                           const f32* queries, const f32* keys, unsigned active) {
  const int lane = threadIdx.x % 32;
  const f32* key_rows = keys + (threadIdx.x / 32 * SLICE + 2 * (lane % 4)) * PITCH;
  const f32* query_rows = queries + lane / 4 * PITCH;
#pragma unroll 1
  for (int d = 0; d < HEAD_DIM; d += 4) {
    Pack<f32, 4> k[SLICE_TILES][2];
#pragma unroll
    for (int n = 0; n < SLICE_TILES; ++n) {
      k[n][0] = load_pack<4>(key_rows + 8 * n * PITCH + d, 0);
      k[n][1] = load_pack<4>(key_rows + (8 * n + 1) * PITCH + d, 0);
    }
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      if (!is_active(active, r)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // of 8 rows
        const Pack<f32, 4> q = load_pack<4>(query_rows + (16 * r + 8 * half) * PITCH + d, 0);
#pragma unroll
        for (int n = 0; n < SLICE_TILES; ++n) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& score = scores[r][n][2 * half + e];
              score = __fmaf_rn(q.at[j], k[n][e].at[j], score);
            }
          }
        }
      }
    }
  }
}

__device__ __forceinline__ void add_values(float (&values)[ROW_TILES][WARP_DIM_TILES][4],
                                           const f32* weights, const f32* tile, unsigned active) {
  const int lane = threadIdx.x % 32;
  const f32* columns = tile + threadIdx.x / 32 * 8 + 2 * (lane % 4);
  const f32* weight_rows = weights + lane / 4 * WEIGHT_PITCH;
#pragma unroll 1
  for (int position = 0; position < KV_TILE; position += 2) {
    Pack<f32, 2> v[WARP_DIM_TILES][2];
#pragma unroll
    for (int n = 0; n < WARP_DIM_TILES; ++n) {
      if (!has_dim_tile(n)) continue;
      v[n][0] = load_pack<2>(columns + position * PITCH + n * WARPS * 8, 0);
      v[n][1] = load_pack<2>(columns + (position + 1) * PITCH + n * WARPS * 8, 0);
    }
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      if (!is_active(active, r)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // of 8 rows
        const Pack<f32, 2> w =
            load_pack<2>(weight_rows + (16 * r + 8 * half) * WEIGHT_PITCH + position, 0);
#pragma unroll
        for (int n = 0; n < WARP_DIM_TILES; ++n) {
          if (!has_dim_tile(n)) continue;
#pragma unroll
          for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& value = values[r][n][2 * half + e];
              value = __fmaf_rn(w.at[j], v[n][j].at[e], value);
            }
          }
        }
      }
    }
  }
}
