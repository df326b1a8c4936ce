// The tiles of gemm_tiles.cu: their shapes, and how shared memory is filled with the next columns
// of W and x while others are multiplied.
#pragma once

#include "gemm.cuh"
#include "gemm_tile_order.cuh"

// FEATURE_WARPS x TOKEN_WARPS warps, each 16 FEATURE_TILES features of 8 TOKEN_TILES tokens.
template <int FEATURE_WARPS_, int TOKEN_WARPS_, int FEATURE_TILES_, int TOKEN_TILES_, int SLABS_,
          int STAGES_, bool ONE_CHUNK_>
struct Shape {
  static constexpr int FEATURE_WARPS = FEATURE_WARPS_;
  static constexpr int TOKEN_WARPS = TOKEN_WARPS_;
  static constexpr int FEATURE_TILES = FEATURE_TILES_;
  static constexpr int TOKEN_TILES = TOKEN_TILES_;
  static constexpr int SLABS = SLABS_;
  static constexpr int STAGES = STAGES_;
  static constexpr bool ONE_CHUNK = ONE_CHUNK_;

  static constexpr int THREADS = 32 * FEATURE_WARPS * TOKEN_WARPS;
  static constexpr int FEATURES = 16 * FEATURE_WARPS * FEATURE_TILES;
  static constexpr int TOKENS = 8 * TOKEN_WARPS * TOKEN_TILES;
  static constexpr int COLUMNS = SLABS * STEP;  // of a stage
  static constexpr int STAGE = (FEATURES + TOKENS) * COLUMNS;  // elements
  // What the threads copy at once: 16 bytes each, of whole blocks of W and whole rows of x.
  static constexpr int BLOCKS_AT_ONCE = THREADS / (64 * SLABS);
  static constexpr int TOKENS_AT_ONCE = THREADS / (4 * SLABS);
  static constexpr int WEIGHT_COPIES = FEATURES / (BLOCK_ROWS * BLOCKS_AT_ONCE);
  static constexpr int TOKEN_COPIES = TOKENS / TOKENS_AT_ONCE;
  static_assert(GRANULE % COLUMNS == 0, "a chunk is a whole number of stages");
  static_assert(WEIGHT_COPIES * BLOCKS_AT_ONCE * BLOCK_ROWS == FEATURES, "whole copies of W");
  static_assert(TOKEN_COPIES * TOKENS_AT_ONCE == TOKENS, "whole copies of x");
};

// The part of a thread in filling stages: which 16 bytes of which blocks and rows. In a stage,
// W lies as it does in memory, then x [SLABS][TOKENS][STEP].
template <class S, bool ALIGNED>
struct Copies {
  const T* weight;  // at the tile's first block and the thread's 16 bytes
  const T* x;       // at the tile's first row
  int weight_blocks[S::WEIGHT_COPIES];  // where the blocks that the thread copies begin, from there
  int x_rows[S::TOKEN_COPIES];          // and the rows
  int row;         // the first of these
  int last_token;  // of the tile
  int column;      // of the first stage
  int x_place;     // in a stage
  int in_features;

  // Of x, eight lanes copy 64 bytes of two rows each, the next eight what lies behind it in these
  // rows. Blocks beyond the last are copies of it: their outputs are not stored. Tokens beyond the
  // last are zeros, which need not be read.
  __device__ __forceinline__ Copies(const Problem& problem, const TilePlace& tile) {
    const int thread = threadIdx.x;
    const int slab = thread / 8 % S::SLABS;
    row = thread / (8 * S::SLABS) * 2 + thread / 4 % 2;
    column = slab * STEP + thread % 4 * 8;
    x_place = S::FEATURES * S::COLUMNS + (slab * S::TOKENS + row) * STEP + thread % 4 * 8;
    in_features = problem.in_features;
    const int first_block = tile.feature / BLOCK_ROWS;
    const int block_size = BLOCK_ROWS * problem.stride;
    weight = problem.weight + (long long)first_block * block_size +
             thread % (64 * S::SLABS) * LANE_ELEMENTS;
    x = problem.x + (long long)tile.token * problem.in_features;
    const int last_block = (problem.out_features - 1) / BLOCK_ROWS - first_block;
    last_token = problem.num_tokens - 1 - tile.token;
#pragma unroll
    for (int i = 0; i < S::WEIGHT_COPIES; ++i) {
      const int block = thread / (64 * S::SLABS) + i * S::BLOCKS_AT_ONCE;
      weight_blocks[i] = min(block, last_block) * block_size;
    }
#pragma unroll
    for (int i = 0; i < S::TOKEN_COPIES; ++i) {
      x_rows[i] = min(row + i * S::TOKENS_AT_ONCE, last_token) * problem.in_features;
    }
  }

  __device__ __forceinline__ void start(T* stage, int number) const {
    const int offset = number * S::COLUMNS;
#pragma unroll
    for (int i = 0; i < S::WEIGHT_COPIES; ++i) {
      T* const to = stage + threadIdx.x * LANE_ELEMENTS + i * S::THREADS * LANE_ELEMENTS;
      copy_async<16>(to, weight + weight_blocks[i] + offset * BLOCK_ROWS);
    }
    T* const to = stage + x_place;
    const int at = column + offset;
    if constexpr (ALIGNED) {
#pragma unroll
      for (int i = 0; i < S::TOKEN_COPIES; ++i) {
        const bool exists = row + i * S::TOKENS_AT_ONCE <= last_token && at < in_features;
        copy_async_or_zero<16>(to + i * S::TOKENS_AT_ONCE * STEP, x + x_rows[i] + (exists ? at : 0),
                               exists ? 16 : 0);
      }
    } else {  // slow, and seldom: no room in registers for more than one at a time
#pragma unroll 1
      for (int i = 0; i < S::TOKEN_COPIES; ++i) {
        const int token = row + i * S::TOKENS_AT_ONCE;
        const T* from = x + min(token, last_token) * in_features;
        *reinterpret_cast<uint4*>(to + i * S::TOKENS_AT_ONCE * STEP) =
            load_x<false>(from, at, token <= last_token ? in_features : 0);
      }
    }
  }
};

// A thread's sums. See ptx.cuh for the layout of the last axis.
template <class S>
using Sums = float[S::FEATURE_TILES][S::TOKEN_TILES][4];
