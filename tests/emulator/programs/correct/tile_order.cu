// Which tile each block of the products for many tokens computes.
#include "gemm_tile_order.cuh"

// out int [gridDim.x, 2]: first feature, first token. One thread.
extern "C" __global__ void tile_order(int* out, int num_tokens, int out_features, int features,
                                      int tokens) {
  Problem problem = {};
  problem.num_tokens = num_tokens;
  problem.out_features = out_features;
  const TilePlace place = tile_of_block(problem, features, tokens);
  out[2 * blockIdx.x] = place.feature;
  out[2 * blockIdx.x + 1] = place.token;
}
