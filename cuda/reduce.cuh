// Sums and maxima over a warp and over a block, in one fixed order.
//
// A warp reduces by the butterfly: five exchanges at distances 16, 8, 4, 2, 1. Addition commutes,
// so all lanes end with the same bits. On the host the 32 values are brought together once and the
// same five steps are done on them, with the same bits. All 32 lanes take part.
//
// A block's warps leave their sums in shared memory; every warp then sums those by the butterfly.
// The order depends on blockDim.x alone, and every thread has the result.
#pragma once

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int MAX_WARPS = 32;  // of a block; blocks are one-dimensional, of whole warps

#ifdef CUPAGED_EMULATED

EMULATOR_UNCHECKED inline float add(float a, float b) { return a + b; }
EMULATOR_UNCHECKED inline float larger(float a, float b) { return __builtin_fmaxf(a, b); }

template <float (*COMBINE)(float, float)>
EMULATOR_UNCHECKED inline void butterfly(const float* const* in, float* const* out,
                                         unsigned arrived, const char* name,
                                         ::emulator::Place place) {
  if (arrived != ALL_LANES) {
    ::emulator::fail(::emulator::Kind::warp_mask, place,
                     "%s takes all 32 lanes of a warp; only the lanes %08x came", name, arrived);
  }
  float value[32];
  float next[32];
  for (int lane = 0; lane < 32; ++lane) value[lane] = *in[lane];
  for (int distance = 16; distance > 0; distance /= 2) {
    for (int lane = 0; lane < 32; ++lane) next[lane] = COMBINE(value[lane], value[lane ^ distance]);
    for (int lane = 0; lane < 32; ++lane) value[lane] = next[lane];
  }
  for (int lane = 0; lane < 32; ++lane) *out[lane] = value[lane];
}

inline float warp_sum(float value, ::emulator::Place place = EMULATOR_HERE) {
  auto all = [place](const float* const* in, float* const* out, unsigned arrived) {
    butterfly<add>(in, out, arrived, "warp_sum", place);
  };
  return ::emulator::warp_collective<float>("warp_sum", ALL_LANES, value, all, place);
}

inline float warp_max(float value, ::emulator::Place place = EMULATOR_HERE) {
  auto all = [place](const float* const* in, float* const* out, unsigned arrived) {
    butterfly<larger>(in, out, arrived, "warp_max", place);
  };
  return ::emulator::warp_collective<float>("warp_max", ALL_LANES, value, all, place);
}

#else

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = __fadd_rn(value, __shfl_xor_sync(ALL_LANES, value, distance));
  }
  return value;
}

// NaN only if all values are: fmaxf prefers a number.
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, distance));
  }
  return value;
}

#endif

// `partial`: shared, float [MAX_WARPS]. It holds a sum until every thread has returned: a second
// sum takes another array, or comes after a barrier.
__device__ __forceinline__ float block_sum(float value, float* partial) {
  const int lane = threadIdx.x % 32;
  const int num_warps = blockDim.x / 32;
  value = warp_sum(value);
  if (lane == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  return warp_sum(lane < num_warps ? partial[lane] : 0.0f);
}

__device__ __forceinline__ float block_max(float value, float* partial) {
  const int lane = threadIdx.x % 32;
  const int num_warps = blockDim.x / 32;
  value = warp_max(value);
  if (lane == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  return warp_max(partial[lane < num_warps ? lane : 0]);
}
