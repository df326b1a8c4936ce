// What the kernels over a row of logits share: walking the row, reductions of 64-bit integers over
// the block, and floats as integers of the same order.
//
// Everything here is exact: maxima and sums of integers, so that no order changes a result. Blocks
// are one-dimensional, of whole warps.
#pragma once

#include "reduce.cuh"

using u64 = unsigned long long;

__device__ __forceinline__ float infinite() { return __uint_as_float(0x7f800000u); }

// Tokens 4 quad to 4 quad + 3 of a row; -inf fills the last quad.
__device__ __forceinline__ void load_quad(float (&logits)[4], const float* row, int size,
                                          int quad) {
  if (size % 4 == 0) {
    const float4 loaded = reinterpret_cast<const float4*>(row)[quad];
    logits[0] = loaded.x;
    logits[1] = loaded.y;
    logits[2] = loaded.z;
    logits[3] = loaded.w;
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      logits[j] = 4 * quad + j < size ? row[4 * quad + j] : -infinite();
    }
  }
}

__device__ __forceinline__ float largest(const float (&logits)[4]) {
  return fmaxf(fmaxf(logits[0], logits[1]), fmaxf(logits[2], logits[3]));
}

__device__ __forceinline__ int count_quads(int size) {
  return size / 4 + (size % 4 == 0 ? 0 : 1);
}

// Calls visit(id, logits, count) for each quad of neighbouring tokens id .. id + count - 1, id a
// multiple of 4, count 4 but at the row's end, where -inf fills the quad. A thread's ids ascend.
// UNROLL quads are under way at a time.
template <int UNROLL, class Visit>
__device__ __forceinline__ void each_quad(const float* row, int size, Visit visit) {
  const int quads = count_quads(size);
#pragma unroll 1
  for (int start = threadIdx.x; start < quads; start += UNROLL * blockDim.x) {
    float logits[UNROLL][4];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int quad = start + u * blockDim.x;
      if (quad < quads) load_quad(logits[u], row, size, quad);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int quad = start + u * blockDim.x;
      if (quad < quads) visit(4 * quad, logits[u], min(4, size - 4 * quad));
    }
  }
}

// The same for the quads that hold a logit not below `floor`, a variable that visit may raise.
// There should be few: they are loaded again, from the cache.
template <class Visit>
__device__ __forceinline__ void each_quad_above(const float* row, int size, const float& floor,
                                                Visit visit) {
  constexpr int AHEAD = 4;
  const int quads = count_quads(size);
#pragma unroll 1
  for (int start = threadIdx.x; start < quads; start += AHEAD * blockDim.x) {
    float highest[AHEAD];
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      const int quad = start + u * blockDim.x;
      float logits[4] = {-infinite(), -infinite(), -infinite(), -infinite()};
      if (quad < quads) load_quad(logits, row, size, quad);
      highest[u] = largest(logits);
    }
    unsigned above = 0;
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) above |= (highest[u] < floor ? 0u : 1u) << u;
#pragma unroll 1
    for (; above != 0; above &= above - 1) {
      const int quad = start + (__ffs(above) - 1) * blockDim.x;
      if (quad >= quads) break;
      float logits[4];
      load_quad(logits, row, size, quad);
      visit(4 * quad, logits, min(4, size - 4 * quad));
    }
  }
}

// Integers in the order of the floats: -0 equals 0, NaN is above everything.
__device__ __forceinline__ unsigned ordered(float value) {
  if (value != value) return 0xffffffffu;
  const unsigned bits = __float_as_uint(__fadd_rn(value, 0.0f));
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// The float of an integer that `ordered` made of a number.
__device__ __forceinline__ float from_ordered(unsigned value) {
  return __uint_as_float((value & 0x80000000u) != 0 ? value & 0x7fffffffu : ~value);
}

// The same for doubles that are numbers. It is never 0.
__device__ __forceinline__ u64 ordered(double value) {
  const u64 bits = (u64)__double_as_longlong(__dadd_rn(value, 0.0));
  return bits >> 63 != 0 ? ~bits : bits | 0x8000000000000000ull;
}

#ifdef CUPAGED_EMULATED

template <bool SUM>
EMULATOR_UNCHECKED inline void combine(const u64* const* in, u64* const* out, unsigned arrived,
                                       const char* name, ::emulator::Place place) {
  if (arrived != ALL_LANES) {
    ::emulator::fail(::emulator::Kind::warp_mask, place,
                     "%s takes all 32 lanes of a warp; only the lanes %08x came", name, arrived);
  }
  u64 total = 0;
  for (int lane = 0; lane < 32; ++lane) {
    total = SUM ? total + *in[lane] : (*in[lane] > total ? *in[lane] : total);
  }
  for (int lane = 0; lane < 32; ++lane) *out[lane] = total;
}

inline u64 warp_sum(u64 value, ::emulator::Place place = EMULATOR_HERE) {
  auto all = [place](const u64* const* in, u64* const* out, unsigned arrived) {
    combine<true>(in, out, arrived, "warp_sum", place);
  };
  return ::emulator::warp_collective<u64>("warp_sum", ALL_LANES, value, all, place);
}

inline u64 warp_max(u64 value, ::emulator::Place place = EMULATOR_HERE) {
  auto all = [place](const u64* const* in, u64* const* out, unsigned arrived) {
    combine<false>(in, out, arrived, "warp_max", place);
  };
  return ::emulator::warp_collective<u64>("warp_max", ALL_LANES, value, all, place);
}

#else

__device__ __forceinline__ u64 warp_sum(u64 value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(ALL_LANES, value, distance);
  }
  return value;
}

__device__ __forceinline__ u64 warp_max(u64 value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = max(value, __shfl_xor_sync(ALL_LANES, value, distance));
  }
  return value;
}

#endif

// `partial`: shared, u64 [MAX_WARPS]. Every thread has the result; `partial` is free again after
// the next barrier, which these begin with.
__device__ __forceinline__ u64 block_max(u64 value, u64* partial) {
  value = warp_max(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  return warp_max(threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : 0);
}

__device__ __forceinline__ u64 block_sum(u64 value, u64* partial) {
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : 0);
}

// The sum of the values of all threads before this one.
__device__ __forceinline__ u64 block_sum_before(u64 value, u64* partial) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  u64 sum = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const u64 below = __shfl_up_sync(ALL_LANES, sum, distance);
    if (lane >= distance) sum += below;
  }
  __syncthreads();
  if (lane == 31) partial[warp] = sum;
  __syncthreads();
  return warp_sum(lane < warp ? partial[lane] : 0) + sum - value;
}

// The highest logit of a row and the lowest id that has it.
struct Highest {
  float logit;
  int id;
};

// `logit` is NaN if any is. `partial` as for `block_max`.
__device__ __forceinline__ Highest highest_logit(const float* row, int size, u64* partial) {
  float best = -infinite();
  int best_id = 0x7fffffff;
  bool numbers = true;
  each_quad<4>(row, size, [&](int id, const float(&logits)[4], int count) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j < count) {
        numbers = numbers && logits[j] == logits[j];
        if (logits[j] > best) {
          best = logits[j];
          best_id = id + j;
        }
      }
    }
  });
  const unsigned order = numbers ? ordered(best) : 0xffffffffu;
  const u64 found = block_max((u64)order << 32 | (unsigned)~best_id, partial);
  const unsigned highest = (unsigned)(found >> 32);
  return {highest == 0xffffffffu ? __uint_as_float(0x7fffffffu) : from_ordered(highest),
          (int)~(unsigned)found};
}
