// A tile of y = x W^T whose chunks are computed by as many blocks, for few tokens: what a block has
// to do, and how the sums of the chunks come together. For the order of summation see gemm.cuh.
//
// Grid: (tiles, num_chunks); num_chunks = ceil(stride / chunk); tiles = ceil(out_features / TILE) *
// ceil(num_tokens / tokens of a tile), those of the same features side by side, so that they read W
// at the same time.
//
// If there are several chunks, each block leaves its sums in `partial`, and the last one of a tile
// to do so adds up all of them, in the order of the chunks, whichever came last. No block waits.
// `tickets` counts the blocks of each tile and is zero again at the end.
#pragma once

#include "gemm.cuh"

constexpr int THREADS = 128;
constexpr int TILE = 64;  // features of a block

// What a block has to do.
struct Share {
  int tile;
  int feature;  // the block's first
  int token;    // the block's first
  int chunk;
  int num_chunks;
  int begin;  // columns of the chunk
  int end;
};

__device__ __forceinline__ Share share_of_block(const Problem& problem, int tokens) {
  const int token_tiles = (problem.num_tokens + tokens - 1) / tokens;
  Share share;
  share.tile = blockIdx.x;
  share.feature = share.tile / token_tiles * TILE;
  share.token = share.tile % token_tiles * tokens;
  share.chunk = blockIdx.y;
  share.num_chunks = gridDim.y;
  share.begin = share.chunk * problem.chunk;
  share.end = min(share.begin + problem.chunk, problem.stride);
  return share;
}

// Sums over all chunks, if this block is the last one of its tile; else false. sum: of this chunk,
// before; of all, after. used: whether the outputs of a group of 4 exist.
template <int GROUPS>
__device__ __forceinline__ bool sum_chunks(float (&sum)[GROUPS][4], const bool (&used)[GROUPS],
                                           float* partial, int* tickets, const Share& share) {
  if (share.num_chunks == 1) return true;
  __shared__ int ticket;
  const long long tile = (long long)share.tile * share.num_chunks;
  const int thread = threadIdx.x;
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
    const long long place = ((tile + share.chunk) * GROUPS + i) * THREADS + thread;
    if (used[i]) {
      reinterpret_cast<float4*>(partial)[place] =
          make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    }
  }
  __threadfence();
  __syncthreads();
  if (thread == 0) ticket = atomicAdd(&tickets[share.tile], 1);
  __syncthreads();
  if (ticket != share.num_chunks - 1) return false;
  __threadfence();
  if (thread == 0) tickets[share.tile] = 0;
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[i][j] = NOTHING;
  }
#pragma unroll 1
  for (int chunk = 0; chunk < share.num_chunks; ++chunk) {
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      if (!used[i]) continue;
      const long long place = ((tile + chunk) * GROUPS + i) * THREADS + thread;
      const float4 part = __ldcg(reinterpret_cast<const float4*>(partial) + place);
      sum[i][0] = __fadd_rn(sum[i][0], part.x);
      sum[i][1] = __fadd_rn(sum[i][1], part.y);
      sum[i][2] = __fadd_rn(sum[i][2], part.z);
      sum[i][3] = __fadd_rn(sum[i][3], part.w);
    }
  }
  return true;
}
