// One kernel a primitive, for bench/gpu_smoke.py: the wrappers of ptx.cuh, what lanes of a warp
// exchange, sums in fixed order, and the arithmetic and the conversions that contracts rest on.
//
// Grid: (1). Block: 32 threads, one a lane, unless a kernel says otherwise. Arrays are as long as
// the lanes use of them. No defines but DTYPE, for common.cuh.
#include "common.cuh"
#include "ptx.cuh"
#include "reduce.cuh"

// c float or int [32, 4], in and out; a unsigned [32, 4]; b unsigned [32, 2].
#define PRODUCT(NAME, SUM)                                                                   \
  extern "C" __global__ __launch_bounds__(32) void NAME##_of(SUM* c, const unsigned* a,      \
                                                             const unsigned* b) {            \
    const int lane = threadIdx.x;                                                            \
    unsigned mine_a[4], mine_b[2];                                                           \
    SUM mine_c[4];                                                                           \
    for (int i = 0; i < 4; ++i) mine_a[i] = a[4 * lane + i];                                 \
    for (int i = 0; i < 2; ++i) mine_b[i] = b[2 * lane + i];                                 \
    for (int i = 0; i < 4; ++i) mine_c[i] = c[4 * lane + i];                                 \
    NAME(mine_c, mine_a, mine_b);                                                            \
    for (int i = 0; i < 4; ++i) c[4 * lane + i] = mine_c[i];                                 \
  }
PRODUCT(mma_f16, float)
PRODUCT(mma_bf16, float)
PRODUCT(mma_s8, int)

// out unsigned [32, COUNT]; rows unsigned [32, 4]: lane l gives the address of row l.
#define LOAD(NAME, COUNT)                                                                    \
  extern "C" __global__ __launch_bounds__(32) void NAME##_of(unsigned* out,                  \
                                                             const unsigned* rows) {         \
    __shared__ uint4 tile[32];                                                               \
    const int lane = threadIdx.x;                                                            \
    tile[lane] = reinterpret_cast<const uint4*>(rows)[lane];                                 \
    __syncthreads();                                                                         \
    unsigned mine[COUNT];                                                                    \
    NAME(mine, &tile[lane]);                                                                 \
    for (int i = 0; i < COUNT; ++i) out[COUNT * lane + i] = mine[i];                         \
  }
LOAD(ldmatrix_x1, 1)
LOAD(ldmatrix_x2, 2)
LOAD(ldmatrix_x4, 4)
LOAD(ldmatrix_x1_trans, 1)
LOAD(ldmatrix_x2_trans, 2)
LOAD(ldmatrix_x4_trans, 4)

template <int BYTES, bool PARTLY>
__device__ __forceinline__ void copy_all(unsigned char* out, const unsigned char* in,
                                         const int* counts) {
  __shared__ uint4 tile[32];
  unsigned char* bytes = reinterpret_cast<unsigned char*>(tile);
  const int at = BYTES * threadIdx.x;
  if constexpr (PARTLY) {
    copy_async_or_zero<BYTES>(bytes + at, in + at, counts[threadIdx.x]);
  } else {
    copy_async<BYTES>(bytes + at, in + at);
  }
  copy_async_commit();
  copy_async_wait<0>();
  for (int i = 0; i < BYTES; ++i) out[at + i] = bytes[at + i];
}

// out, in bytes [32, BYTES]; counts [32]: bytes that a lane copies before zeros.
#define COPY(BYTES)                                                                          \
  extern "C" __global__ __launch_bounds__(32) void copy_##BYTES(unsigned char* out,          \
                                                                const unsigned char* in) {   \
    copy_all<BYTES, false>(out, in, nullptr);                                                \
  }                                                                                          \
  extern "C" __global__ __launch_bounds__(32) void copy_or_zero_##BYTES(                     \
      unsigned char* out, const unsigned char* in, const int* counts) {                      \
    copy_all<BYTES, true>(out, in, counts);                                                  \
  }
COPY(4)
COPY(8)
COPY(16)

// Two groups under way: after the wait for all but one, the first is there. out, in [64].
extern "C" __global__ __launch_bounds__(32) void two_groups(unsigned* out, const unsigned* in) {
  __shared__ unsigned tile[2][32];
  const int lane = threadIdx.x;
  copy_async<4>(&tile[0][lane], in + lane);
  copy_async_commit();
  copy_async<4>(&tile[1][lane], in + 32 + lane);
  copy_async_commit();
  copy_async_wait<1>();
  out[lane] = tile[0][lane];
  copy_async_wait_all();
  out[32 + lane] = tile[1][lane];
}

// What lanes exchange. out unsigned [6, 32]; x unsigned [32].
extern "C" __global__ __launch_bounds__(32) void shuffles(unsigned* out, const unsigned* x) {
  const int lane = threadIdx.x;
  const unsigned value = x[lane];
  out[lane] = __shfl_sync(ALL_LANES, value, (7 * lane) % 32);
  out[32 + lane] = __shfl_xor_sync(ALL_LANES, value, 5);
  out[64 + lane] = __shfl_up_sync(ALL_LANES, value, 3);
  out[96 + lane] = __shfl_down_sync(ALL_LANES, value, 9);
  out[128 + lane] = __ballot_sync(ALL_LANES, value % 3 == 0);
  out[160 + lane] = __any_sync(ALL_LANES, value == x[31]) + 2 * __all_sync(ALL_LANES, value > 0);
}

// Sums and maxima in their fixed order. Block: 256. out float [4, 256]; x float [256].
extern "C" __global__ __launch_bounds__(256) void sums(float* out, const float* x) {
  __shared__ float partial[MAX_WARPS];
  __shared__ float partial_largest[MAX_WARPS];
  const int i = threadIdx.x;
  out[i] = warp_sum(x[i]);
  out[256 + i] = warp_max(x[i]);
  out[512 + i] = block_sum(x[i], partial);
  out[768 + i] = block_max(x[i], partial_largest);
}

// What IEEE 754 rounds one way only. Block: 256. out float [6, 256]; x, y, z float [256].
extern "C" __global__ __launch_bounds__(256) void arithmetic(float* out, const float* x,
                                                             const float* y, const float* z) {
  const int i = threadIdx.x;
  out[i] = __fmaf_rn(x[i], y[i], z[i]);
  out[256 + i] = __fmul_rn(x[i], y[i]);
  out[512 + i] = __fadd_rn(x[i], y[i]);
  out[768 + i] = __fdiv_rn(x[i], y[i]);
  out[1024 + i] = __fsqrt_rn(fabsf(x[i]));
  out[1280 + i] = x[i] / y[i] + x[i] * z[i];  // nothing is contracted
}

// Conversions there and back. Block: 256. halves, bfloats: bits [256]; back float [2, 256].
extern "C" __global__ __launch_bounds__(256) void conversions(f16* halves, bf16* bfloats,
                                                              float* back, const float* x) {
  const int i = threadIdx.x;
  halves[i] = round_to<f16>(x[i]);
  bfloats[i] = round_to<bf16>(x[i]);
  back[i] = to_float(round_to<f16>(x[i]));
  back[256 + i] = to_float(round_to<bf16>(x[i]));
}

// What a library computes, each in its own way. Block: 256. out float [5, 256]; x float [256].
extern "C" __global__ __launch_bounds__(256) void functions(float* out, const float* x) {
  const int i = threadIdx.x;
  out[i] = expf(x[i]);
  out[256 + i] = exp2f(x[i]);
  out[512 + i] = tanhf(x[i]);
  out[768 + i] = erff(x[i]);
  out[1024 + i] = logf(fabsf(x[i]));
}
