// y = x W^T (+ b) for few tokens: decoding. Bound by the bytes of W, which are read once.
//
// Arrays: out Out [num_tokens, out_features]; x T [num_tokens, in_features]; weight T
// [out_features, stride] as packed_weight.cuh states; bias float [out_features]; partial float
// [num_chunks * tiles * TILE * tokens], see below; tickets int [tiles], zeros before and after.
// Contiguous, each aligned to 16 bytes, none overlaps another.
// Order of summation, rounding and defines: see gemm.cuh.
//
// Grid: (tiles, num_chunks), num_chunks = ceil(stride / chunk), tiles = ceil(out_features / 64) *
// ceil(num_tokens / tokens); tokens = 8, 16 or 32 by the kernel's name. Tiles of the same features
// lie side by side. Block: 128. A block computes one chunk of 64 features of `tokens` tokens; a
// warp 16 of the features. If there is one chunk, the block writes the outputs. Else it leaves its
// sums in `partial`, and the last block of a tile to do so adds up all of them, in the order of the
// chunks, whichever came last. No block waits.
//
// W goes from memory to the registers of the tensor cores, 16 bytes a lane and load, SLOTS granules
// of 64 columns ahead (a granule is 2 KB a warp), past L1 as far as it can, so that x stays there.
//
// Cost: out_features * stride * sizeof(T) bytes of W; x and `partial` come from L2.
// FLOPs: 2 num_tokens out_features in_features.
#include "gemm.cuh"
#include "gemm_chunks.cuh"

static_assert(!IS_F32, "f32: see gemm_f32.cu");

// A lane's part of a granule: two steps of two products.
template <int GROUPS>
struct Slot {
  uint4 weight[4];
  uint4 x[GROUPS][2];  // of token g of each group of 8
};

// One chunk of a tile, a warp for each 16 features.
template <int GROUPS, int SLOTS, bool ALIGNED>
__device__ __forceinline__ void compute_rows(const Problem& problem, float* partial,
                                             int* tickets) {
  const Share share = share_of_block(problem, 8 * GROUPS);
  const int lane = threadIdx.x % 32;
  // What lies beyond the last block of features or the last token is computed from it instead, and
  // not stored.
  const int first_feature = share.feature + threadIdx.x / 32 * BLOCK_ROWS;
  const int block = min(first_feature, problem.out_features - 1) / BLOCK_ROWS;
  const T* const weight = problem.weight + (long long)block * BLOCK_ROWS * problem.stride +
                          share.begin / STEP * (2 * PRODUCT) + lane * LANE_ELEMENTS;
  const int column = share.begin + lane % 4 * 8;
  const T* x[GROUPS];
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
    const int token = min(share.token + lane / 4 + 8 * i, problem.num_tokens - 1);
    x[i] = problem.x + (long long)token * problem.in_features;
  }

  auto load = [&](Slot<GROUPS>& slot, int granule) {
    const T* const from = weight + granule * (4 * PRODUCT);
#pragma unroll
    for (int product = 0; product < 4; ++product) {
      slot.weight[product] = __ldcs(reinterpret_cast<const uint4*>(from + product * PRODUCT));
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        slot.x[i][step] =
            load_x<ALIGNED>(x[i], column + granule * GRANULE + step * STEP, problem.in_features);
      }
    }
  };

  const int granules = (share.end - share.begin) / GRANULE;
  float sum[GROUPS][4] = {};
  Slot<GROUPS> slots[SLOTS];
#pragma unroll
  for (int i = 0; i < SLOTS; ++i) {
    if (i < granules) load(slots[i], i);
  }
#pragma unroll 1
  for (int granule = 0; granule < granules; granule += SLOTS) {
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      if (granule + i >= granules) break;
      Slot<GROUPS>& slot = slots[i];
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const uint4 first = slot.weight[2 * step];
        const uint4 second = slot.weight[2 * step + 1];
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) {
          multiply(sum[j], first, slot.x[j][step].x, slot.x[j][step].y);
        }
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) {
          multiply(sum[j], second, slot.x[j][step].z, slot.x[j][step].w);
        }
      }
      if (granule + i + SLOTS < granules) load(slot, granule + i + SLOTS);
    }
  }

  const int feature = first_feature + lane / 4;
  const int token = share.token + lane % 4 * 2;
  bool used[GROUPS];
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) used[i] = token + 8 * i < problem.num_tokens;
  if (!sum_chunks(sum, used, partial, tickets, share)) return;
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) store_product(problem, token + 8 * i, feature, sum[i]);
}

// The tokens of a block are `GROUPS` groups of 8.
template <int GROUPS, int SLOTS>
__device__ __forceinline__ void compute(const Problem& problem, float* partial, int* tickets) {
  if (rows_are_aligned<T>(problem.in_features)) {
    compute_rows<GROUPS, SLOTS, true>(problem, partial, tickets);
  } else {
    compute_rows<GROUPS, 1, false>(problem, partial, tickets);
  }
}

extern "C" __global__ __launch_bounds__(THREADS) void gemm_rows_8(
    Out* __restrict__ out,           // [num_tokens, out_features]
    float* __restrict__ partial,     // [num_chunks * tiles * 64 * 8]
    int* __restrict__ tickets,       // [tiles], zeros
    const T* __restrict__ x,         // [num_tokens, in_features]
    const T* __restrict__ weight,    // [rows, stride], packed
#if BIAS
    const float* __restrict__ bias,  // [out_features]
#endif
    int num_tokens,
    int out_features,
    int in_features,
    int stride,
    int chunk) {
#if !BIAS
  const float* bias = nullptr;
#endif
  const Problem problem = {out,          x,           weight, bias, num_tokens,
                           out_features, in_features, stride, chunk};
  compute<1, 4>(problem, partial, tickets);
}

extern "C" __global__ __launch_bounds__(THREADS) void gemm_rows_16(
    Out* __restrict__ out,           // [num_tokens, out_features]
    float* __restrict__ partial,     // [num_chunks * tiles * 64 * 16]
    int* __restrict__ tickets,       // [tiles], zeros
    const T* __restrict__ x,         // [num_tokens, in_features]
    const T* __restrict__ weight,    // [rows, stride], packed
#if BIAS
    const float* __restrict__ bias,  // [out_features]
#endif
    int num_tokens,
    int out_features,
    int in_features,
    int stride,
    int chunk) {
#if !BIAS
  const float* bias = nullptr;
#endif
  const Problem problem = {out,          x,           weight, bias, num_tokens,
                           out_features, in_features, stride, chunk};
  compute<2, 3>(problem, partial, tickets);
}

extern "C" __global__ __launch_bounds__(THREADS) void gemm_rows_32(
    Out* __restrict__ out,           // [num_tokens, out_features]
    float* __restrict__ partial,     // [num_chunks * tiles * 64 * 32]
    int* __restrict__ tickets,       // [tiles], zeros
    const T* __restrict__ x,         // [num_tokens, in_features]
    const T* __restrict__ weight,    // [rows, stride], packed
#if BIAS
    const float* __restrict__ bias,  // [out_features]
#endif
    int num_tokens,
    int out_features,
    int in_features,
    int stride,
    int chunk) {
#if !BIAS
  const float* bias = nullptr;
#endif
  const Problem problem = {out,          x,           weight, bias, num_tokens,
                           out_features, in_features, stride, chunk};
  compute<4, 2>(problem, partial, tickets);
}

/* check -DDTYPE=bf16
features, columns, chunk = 20, 300, 256  # padded to 32 x 320: two chunks, 256 and 64
weight, packed = normal(features, columns), empty(32, 320)
# The layout of packed_weight.cuh: [rows / 16, half, g, blocks, t, product, pair, 2], transposed.
padded = np.zeros((32, 320), weight.dtype)
padded[:features, :columns] = weight
parts = padded.reshape(2, 2, 8, 10, 4, 2, 2, 2).transpose(0, 3, 5, 2, 4, 6, 1, 7)
packed[...] = parts.reshape(32, 320)
for kernel, tokens in ((gemm_rows_8, 8), (gemm_rows_16, 16), (gemm_rows_32, 32)):
    count = tokens - 3
    x, out = normal(count, columns), empty(count, features)
    partial, tickets = empty(2 * 64 * tokens, dtype=np.float32), np.zeros(1, np.int32)
    sizes = [np.int32(n) for n in (count, features, columns, 320, chunk)]
    kernel((1, 2), (128,), (out, partial, tickets, x, packed, *sizes))
    expect(out, np.float64(x) @ np.float64(weight).T, tolerance=0.05)
    expect(tickets, np.zeros(1), tolerance=0)
*/
