// The way of a tile's sums to y: through shared memory, because a lane's outputs are of different
// tokens and so lie far apart. Whole rows of the tile leave it, 16 bytes a lane where rows of y
// allow.
#pragma once

#include "gemm_tile_stages.cuh"

// A part of the tile's tokens at a time, so that it fits where the stages were: of each warp, PART
// of its groups of 8 tokens. Rows are padded so that a warp writes without a bank conflict.
template <class S>
struct Store {
  static constexpr int PITCH = S::FEATURES + WIDEST<Out>;  // elements
  static constexpr int ROOM = S::STAGES * S::STAGE * int(sizeof(T)) / (PITCH * int(sizeof(Out)));
  static constexpr int PART =
      S::TOKENS <= ROOM ? S::TOKEN_TILES : S::TOKEN_TILES / 2;  // groups of 8 tokens
  static constexpr int ROWS = S::TOKEN_WARPS * PART * 8;
  static_assert(ROWS <= ROOM && S::TOKEN_TILES % PART == 0, "a part fits into the stages");
};

// A warp's outputs of `part`, rounded, into rows of shared memory.
template <class S>
__device__ __forceinline__ void stage_part(const Problem& problem, const TilePlace& tile,
                                           const Sums<S>& sum, Out* staged, int part) {
  constexpr int PART = Store<S>::PART;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int first_feature = warp / S::TOKEN_WARPS * S::FEATURE_TILES * 16 + lane / 4;
  const int first_row = warp % S::TOKEN_WARPS * PART * 8 + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < S::FEATURE_TILES; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int feature = first_feature + i * 16 + half * 8;
      float bias = 0.0f;
      if constexpr (BIAS == 1) {
        if (tile.feature + feature < problem.out_features) {
          bias = problem.bias[tile.feature + feature];
        }
      }
#pragma unroll
      for (int j = 0; j < S::TOKEN_TILES; ++j) {
        if (j / PART != part) continue;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float value = sum[i][j][2 * half + k];
          if constexpr (BIAS == 1) value = __fadd_rn(value, bias);
          staged[(first_row + j % PART * 8 + k) * Store<S>::PITCH + feature] = round_to<Out>(value);
        }
      }
    }
  }
}

// Rows of shared memory to y, N elements a thread and step.
template <class S, int N>
__device__ __forceinline__ void copy_part(const Problem& problem, const TilePlace& tile,
                                          const Out* staged, int part) {
  constexpr int PART = Store<S>::PART;
  constexpr int PACKS = S::FEATURES / N;
#pragma unroll 1
  for (int i = threadIdx.x; i < Store<S>::ROWS * PACKS; i += S::THREADS) {
    const int row = i / PACKS;
    const int feature = i % PACKS * N;
    const int token = tile.token + row / (PART * 8) * S::TOKEN_TILES * 8 + part * PART * 8 +
                      row % (PART * 8);
    if (token >= problem.num_tokens || tile.feature + feature >= problem.out_features) continue;
    Out* const to = problem.out + (long long)token * problem.out_features + tile.feature + feature;
    store_pack<N>(to, 0, load_pack<N>(staged + row * Store<S>::PITCH + feature, 0));
  }
}

// Every thread of the block calls it, when its asynchronous copies are done.
template <class S>
__device__ __forceinline__ void store_tile(const Problem& problem, const TilePlace& tile,
                                           const Sums<S>& sum, void* shared) {
  Out* const staged = static_cast<Out*>(shared);
#pragma unroll
  for (int part = 0; part < S::TOKEN_TILES / Store<S>::PART; ++part) {
    __syncthreads();  // the stages, or the part before, have been used
    stage_part<S>(problem, tile, sum, staged, part);
    __syncthreads();
    if (rows_are_aligned<Out>(problem.out_features)) {
      copy_part<S, WIDEST<Out>>(problem, tile, staged, part);
    } else {
      copy_part<S, 1>(problem, tile, staged, part);
    }
  }
}
