// Which tile of y a block of gemm_tiles.cu or gemm_f32_tiles computes: blocks that run at the same
// time shall read the same rows of x and W, so that these come from L2.
#pragma once

#include "gemm.cuh"

constexpr int GROUP = 16;  // tiles of tokens that go through the features together

struct TilePlace {
  int feature;  // the first
  int token;
};

// Grid: (tiles of features * tiles of tokens). In a group, tokens go first.
__device__ __forceinline__ TilePlace tile_of_block(const Problem& problem, int features,
                                                   int tokens) {
  const unsigned feature_tiles = (problem.out_features + features - 1) / features;
  const unsigned token_tiles = (problem.num_tokens + tokens - 1) / tokens;
  const unsigned group = blockIdx.x / (GROUP * feature_tiles);
  const unsigned within = blockIdx.x % (GROUP * feature_tiles);
  const unsigned size = min(token_tiles - group * GROUP, unsigned(GROUP));
  TilePlace place;
  place.feature = within / size * features;
  place.token = (group * GROUP + within % size) * tokens;
  return place;
}
