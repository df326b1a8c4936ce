// y = x W^T (+ b) for many tokens: prefill and large batches. Bound by the tensor cores.
//
// Arrays: out Out [num_tokens, out_features]; x T [num_tokens, in_features]; weight T
// [out_features, stride] as packed_weight.cuh states; bias float [out_features]. Contiguous, each
// aligned to 16 bytes, none overlaps another.
// Order of summation, rounding and defines: see gemm.cuh. T is f16 or bf16.
//
// Grid: (tiles), a block a tile of y; see gemm_tile_order.cuh. A block walks all columns and adds
// up the sums of the chunks as it passes their ends.
//
//   kernel            tile: features x tokens   block         of a warp   dynamic shared memory
//   gemm_tiles_64       64 x 64                 2 x 2 warps   32 x 32      49,152 bytes
//   gemm_tiles_128     128 x 128                2 x 4 warps   64 x 32      98,304 bytes
//   gemm_tiles_256     256 x 128                4 x 2 warps   64 x 64      98,304 bytes
//
// gemm_tiles_256 keeps no sum beside that of the chunk and loads x by 16 bytes only: for weights of
// one chunk, whose in_features are a multiple of 8.
//
// Shared memory: STAGES stages of SLABS slabs of 32 columns. A warp's loads of 16 bytes a lane read
// 512 bytes in one piece, a product of W or 8 rows of x, without a bank conflict, and give each
// lane its part of A of one product or of B of two; ldmatrix would take other columns into a
// product. Asynchronous copies fill a stage while others are used; one barrier a stage.
//
// Cost: 2 num_tokens out_features in_features FLOPs. A tile reads (features + tokens) * stride *
// sizeof(T) bytes from L2.
#include "gemm_tile_stages.cuh"
#include "gemm_tile_store.cuh"

static_assert(!IS_F32, "f32: see gemm_f32.cu");

using Shape64 = Shape<2, 2, 2, 4, 2, 3, false>;
using Shape128 = Shape<2, 4, 4, 4, 2, 3, false>;
using Shape256 = Shape<4, 2, 4, 8, 1, 4, true>;

// Adds the columns of one stage, step by step. The pointers are at the lane's bytes of the warp's
// first block of W and first 8 rows of x.
template <class S>
__device__ __forceinline__ void add_stage(Sums<S>& sum, const T* weight, const T* x) {
#pragma unroll
  for (int slab = 0; slab < S::SLABS; ++slab) {
    uint4 tokens[S::TOKEN_TILES];
#pragma unroll
    for (int j = 0; j < S::TOKEN_TILES; ++j) {
      tokens[j] = *reinterpret_cast<const uint4*>(x + (slab * S::TOKENS + j * 8) * STEP);
    }
#pragma unroll
    for (int i = 0; i < S::FEATURE_TILES; ++i) {
      const T* block = weight + (i * S::SLABS + slab) * (2 * PRODUCT);
      const uint4 first = *reinterpret_cast<const uint4*>(block);
      const uint4 second = *reinterpret_cast<const uint4*>(block + PRODUCT);
#pragma unroll
      for (int j = 0; j < S::TOKEN_TILES; ++j) {
        multiply(sum[i][j], first, tokens[j].x, tokens[j].y);
      }
#pragma unroll
      for (int j = 0; j < S::TOKEN_TILES; ++j) {
        multiply(sum[i][j], second, tokens[j].z, tokens[j].w);
      }
    }
  }
}

template <class S>
__device__ __forceinline__ void fill(Sums<S>& sum, float value) {
#pragma unroll
  for (int i = 0; i < S::FEATURE_TILES; ++i) {
#pragma unroll
    for (int j = 0; j < S::TOKEN_TILES; ++j) {
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[i][j][k] = value;
    }
  }
}

template <class S>
__device__ __forceinline__ void add_chunk(Sums<S>& total, const Sums<S>& sum) {
#pragma unroll
  for (int i = 0; i < S::FEATURE_TILES; ++i) {
#pragma unroll
    for (int j = 0; j < S::TOKEN_TILES; ++j) {
#pragma unroll
      for (int k = 0; k < 4; ++k) total[i][j][k] = __fadd_rn(total[i][j][k], sum[i][j][k]);
    }
  }
}

// Tells at which stage a chunk ends, without divisions in the loop.
struct ChunkEnds {
  int stages_a_chunk;
  int left;

  __device__ __forceinline__ explicit ChunkEnds(int stages)
      : stages_a_chunk(stages), left(stages) {}

  __device__ __forceinline__ bool passed() {
    left -= 1;
    if (left > 0) return false;
    left = stages_a_chunk;
    return true;
  }
};

template <class S, bool ALIGNED>
__device__ __forceinline__ void compute_tile(const Problem& problem) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  T* const shared = reinterpret_cast<T*>(shared_bytes);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int first_feature = warp / S::TOKEN_WARPS * S::FEATURE_TILES * 16;
  const int first_token = warp % S::TOKEN_WARPS * S::TOKEN_TILES * 8;
  const T* const weight = shared + first_feature * S::COLUMNS + lane * LANE_ELEMENTS;
  const T* const x =
      shared + S::FEATURES * S::COLUMNS + first_token * STEP + lane * LANE_ELEMENTS;
  const TilePlace tile = tile_of_block(problem, S::FEATURES, S::TOKENS);
  const Copies<S, ALIGNED> copies(problem, tile);
  const int stages = problem.stride / S::COLUMNS;

#pragma unroll
  for (int stage = 0; stage < S::STAGES - 1; ++stage) {
    if (stage < stages) copies.start(shared + stage * S::STAGE, stage);
    copy_async_commit();
  }
  Sums<S> sum;
  Sums<S> total;  // not used, and not there, if ONE_CHUNK
  fill<S>(sum, 0.0f);
  if constexpr (!S::ONE_CHUNK) fill<S>(total, NOTHING);
  ChunkEnds ends(problem.chunk / S::COLUMNS);
  int use = 0;                // where in shared memory the stage lies
  int refill = S::STAGES - 1;  // and where the one goes that is copied meanwhile
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    copy_async_wait<S::STAGES - 2>();
    __syncthreads();  // the stage is there, and the one that is refilled has been used
    if (stage + S::STAGES - 1 < stages) {
      copies.start(shared + refill * S::STAGE, stage + S::STAGES - 1);
    }
    copy_async_commit();
    add_stage<S>(sum, weight + use * S::STAGE, x + use * S::STAGE);
    use = use + 1 == S::STAGES ? 0 : use + 1;
    refill = refill + 1 == S::STAGES ? 0 : refill + 1;
    if constexpr (!S::ONE_CHUNK) {
      if (ends.passed() || stage + 1 == stages) {
        add_chunk<S>(total, sum);
        fill<S>(sum, 0.0f);
      }
    }
  }

  copy_async_wait_all();
  if constexpr (S::ONE_CHUNK) {
    store_tile<S>(problem, tile, sum, shared_bytes);
  } else {
    store_tile<S>(problem, tile, total, shared_bytes);
  }
}

template <class S>
__device__ __forceinline__ void compute(const Problem& problem) {
  if (rows_are_aligned<T>(problem.in_features)) {
    compute_tile<S, true>(problem);
  } else {
    compute_tile<S, false>(problem);
  }
}

extern "C" __global__ __launch_bounds__(Shape64::THREADS) void gemm_tiles_64(
    Out* __restrict__ out,         // [num_tokens, out_features]
    const T* __restrict__ x,       // [num_tokens, in_features]
    const T* __restrict__ weight,  // [rows, stride], packed
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
  compute<Shape64>(problem);
}

extern "C" __global__ __launch_bounds__(Shape128::THREADS) void gemm_tiles_128(
    Out* __restrict__ out,         // [num_tokens, out_features]
    const T* __restrict__ x,       // [num_tokens, in_features]
    const T* __restrict__ weight,  // [rows, stride], packed
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
  compute<Shape128>(problem);
}

extern "C" __global__ __launch_bounds__(Shape256::THREADS) void gemm_tiles_256(
    Out* __restrict__ out,         // [num_tokens, out_features]
    const T* __restrict__ x,       // [num_tokens, in_features]
    const T* __restrict__ weight,  // [rows, stride], packed
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
  compute_tile<Shape256, true>(problem);
}

/* check -DDTYPE=f16
features, columns, chunk = 20, 300, 256  # padded to 32 x 320: two chunks, 256 and 64
weight, packed = normal(features, columns), empty(32, 320)
# The layout of packed_weight.cuh: [rows / 16, half, g, blocks, t, product, pair, 2], transposed.
padded = np.zeros((32, 320), weight.dtype)
padded[:features, :columns] = weight
parts = padded.reshape(2, 2, 8, 10, 4, 2, 2, 2).transpose(0, 3, 5, 2, 4, 6, 1, 7)
packed[...] = parts.reshape(32, 320)
x, out = normal(70, columns), empty(70, features)
sizes = [np.int32(n) for n in (70, features, columns, 320, chunk)]
gemm_tiles_64((2,), (128,), (out, x, packed, *sizes), shared_mem=49152)
expect(out, np.float64(x) @ np.float64(weight).T, tolerance=0.02)
out = empty(70, features)
gemm_tiles_128.max_dynamic_shared_size_bytes = gemm_tiles_256.max_dynamic_shared_size_bytes = 98304
gemm_tiles_128((1,), (256,), (out, x, packed, *sizes), shared_mem=98304)
expect(out, np.float64(x) @ np.float64(weight).T, tolerance=0.02)
x, out = normal(70, 320), empty(70, features)
whole = [np.int32(n) for n in (70, features, 320, 320, 320)]
gemm_tiles_256((1,), (256,), (out, x, packed, *whole), shared_mem=98304)
expect(out, np.float64(x) @ np.float64(padded[:features]).T, tolerance=0.02)
*/
