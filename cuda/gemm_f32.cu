// y = x W^T (+ b) in f32: no tensor cores, which would round. For the order of summation see
// gemm.cuh.
//
// Arrays, grid and cost: gemm_f32_rows as gemm_rows.cu with 16 tokens a tile, gemm_f32_tiles as
// gemm_tiles.cu with tiles of 64 features and 64 tokens. Block: 128.
//
// Thread i of a block computes features 4 (i % 16) .. + 3 of as many tokens as there are TOKENS,
// from TOKENS (i / 16) on. W and x pass through shared memory, transposed, 16 columns at a time.
//
// Define: DTYPE = f32. BIAS: see gemm.cuh. Bound by arithmetic unless there are very few tokens.
#include "gemm.cuh"
#include "gemm_chunks.cuh"
#include "gemm_tile_order.cuh"

static_assert(IS_F32, "f16 and bf16: see gemm_rows.cu and gemm_tiles.cu");

constexpr int DEPTH = 16;   // columns in shared memory
constexpr int PADDING = 4;  // of its rows, which are written down the columns

// Puts columns `column` .. + 15 of `count` rows, from row `first` on, into tile[column][row]. Rows
// from `num_rows` on are zeros, and so are columns from `num_columns` on.
template <bool ALIGNED, int SIZE>
__device__ __forceinline__ void load_transposed(float (*tile)[SIZE], int count, const T* rows,
                                                long long stride, int first, int num_rows,
                                                int column, int num_columns) {
#pragma unroll 1
  for (int i = threadIdx.x; i < count * DEPTH / 4; i += THREADS) {
    const int row = i / (DEPTH / 4);
    const int at = i % (DEPTH / 4) * 4;
    uint4 words = make_uint4(0, 0, 0, 0);
    if (first + row < num_rows) {
      words = load_x<ALIGNED>(rows + (first + row) * stride, column + at, num_columns);
    }
    tile[at][row] = __uint_as_float(words.x);
    tile[at + 1][row] = __uint_as_float(words.y);
    tile[at + 2][row] = __uint_as_float(words.z);
    tile[at + 3][row] = __uint_as_float(words.w);
  }
}

// sum[token][feature] += the columns [begin, end), one by one. Every thread of the block calls it.
template <int TOKENS, bool ALIGNED>
__device__ __forceinline__ void add_columns(float (&sum)[TOKENS][4], const Problem& problem,
                                                int feature, int token, int begin, int end) {
  __shared__ __align__(16) float weight[DEPTH][TILE + PADDING];
  __shared__ __align__(16) float x[DEPTH][8 * TOKENS + PADDING];
  const int my_feature = threadIdx.x % 16 * 4;
  const int my_token = threadIdx.x / 16 * TOKENS;
#pragma unroll 1
  for (int column = begin; column < end; column += DEPTH) {
    __syncthreads();  // what was there has been read
    load_transposed<true>(weight, TILE, problem.weight, problem.stride, feature,
                          problem.out_features, column, problem.stride);
    load_transposed<ALIGNED>(x, 8 * TOKENS, problem.x, problem.in_features, token,
                             problem.num_tokens, column, problem.in_features);
    __syncthreads();
#pragma unroll 4
    for (int k = 0; k < DEPTH; ++k) {
      const Pack<float, 4> w = load_pack<4>(&weight[k][my_feature], 0);
#pragma unroll
      for (int i = 0; i < TOKENS; ++i) {
        const float factor = x[k][my_token + i];
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = __fmaf_rn(w.at[j], factor, sum[i][j]);
      }
    }
  }
}

// The outputs of a thread; `feature` and `token` are the block's first.
template <int TOKENS>
__device__ __forceinline__ void store_tile(const Problem& problem, int feature, int token,
                                          const float (&sum)[TOKENS][4]) {
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      store_output(problem, token + threadIdx.x / 16 * TOKENS + i,
                   feature + threadIdx.x % 16 * 4 + j, sum[i][j]);
    }
  }
}

// One chunk of a tile.
template <int TOKENS, bool ALIGNED>
__device__ __forceinline__ void compute_rows(const Problem& problem, float* partial,
                                             int* tickets) {
  const Share share = share_of_block(problem, 8 * TOKENS);
  float sum[TOKENS][4] = {};
  add_columns<TOKENS, ALIGNED>(sum, problem, share.feature, share.token, share.begin, share.end);
  bool used[TOKENS];
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) {
    used[i] = share.token + int(threadIdx.x) / 16 * TOKENS + i < problem.num_tokens;
  }
  if (!sum_chunks(sum, used, partial, tickets, share)) return;
  store_tile(problem, share.feature, share.token, sum);
}

// All chunks of a tile.
template <int TOKENS, bool ALIGNED>
__device__ __forceinline__ void compute_tile(const Problem& problem) {
  const TilePlace place = tile_of_block(problem, TILE, 8 * TOKENS);
  float total[TOKENS][4];
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) total[i][j] = NOTHING;
  }
#pragma unroll 1
  for (int begin = 0; begin < problem.stride; begin += problem.chunk) {
    const int end = min(begin + problem.chunk, problem.stride);
    float sum[TOKENS][4] = {};
    add_columns<TOKENS, ALIGNED>(sum, problem, place.feature, place.token, begin, end);
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) total[i][j] = __fadd_rn(total[i][j], sum[i][j]);
    }
  }
  store_tile(problem, place.feature, place.token, total);
}

extern "C" __global__ __launch_bounds__(THREADS) void gemm_f32_rows(
    Out* __restrict__ out,         // [num_tokens, out_features]
    float* __restrict__ partial,   // [num_chunks * tiles * 64 * 16]
    int* __restrict__ tickets,     // [tiles], zeros
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
  if (rows_are_aligned<T>(in_features)) {
    compute_rows<2, true>(problem, partial, tickets);
  } else {
    compute_rows<2, false>(problem, partial, tickets);
  }
}

extern "C" __global__ __launch_bounds__(THREADS) void gemm_f32_tiles(
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
  if (rows_are_aligned<T>(in_features)) {
    compute_tile<8, true>(problem);
  } else {
    compute_tile<8, false>(problem);
  }
}

/* check -DDTYPE=f32
features, columns, chunk = 20, 300, 256  # padded to 32 x 320: two chunks, 256 and 64
weight, packed = normal(features, columns), np.zeros((32, 320), np.float32)
packed[:features, :columns] = weight
for count in (5, 70):
    x, out = normal(count, columns), empty(count, features)
    sizes = [np.int32(n) for n in (count, features, columns, 320, chunk)]
    if count == 5:
        partial, tickets = empty(2 * 64 * 16), np.zeros(1, np.int32)
        gemm_f32_rows((1, 2), (128,), (out, partial, tickets, x, packed, *sizes))
    else:
        gemm_f32_tiles((2,), (128,), (out, x, packed, *sizes))
    expect(out, np.float64(x) @ np.float64(weight).T, tolerance=1e-4)
*/
