// The running softmax of a row (Milakov and Gimelshein, 2018), and how two of them are merged.
//
// A state is a maximum m, a sum l and values o, and stands for the weights 2^(score - m) of the
// keys seen so far: l is their sum, o the sum of weight * value. An empty state is (-inf, 0, 0).
// Merging an empty state into another one changes nothing, and merging into an empty one copies.
#pragma once

#include "common.cuh"

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

constexpr float LOG2_E = 1.44269504088896340736f;  // scores are in powers of 2

// -inf - -inf is NaN; with 0 in its place the weights of an empty state are 2^-inf = 0.
__device__ __forceinline__ float base_of(float maximum) {
  return maximum == minus_infinity() ? 0.0f : maximum;
}

// What the sums of the two states count for in the merged one.
struct Scales {
  float left;
  float right;
};

// left = larger maximum; the new maximum is left's.
__device__ __forceinline__ Scales merge_maxima(float& left, float right) {
  const float merged = fmaxf(left, right);
  const float base = base_of(merged);
  const Scales scales{exp2f(__fsub_rn(left, base)), exp2f(__fsub_rn(right, base))};
  left = merged;
  return scales;
}

__device__ __forceinline__ float merge_sums(float left, float right, Scales scales) {
  return __fmaf_rn(right, scales.right, __fmul_rn(left, scales.left));
}

// What o is multiplied with at the end: 1 / l, l with the head's sink where there are SINKS. No row
// without a key is asked for, but it would be zeros.
__device__ __forceinline__ float output_scale(float maximum, float sum, const T* sinks, int head) {
  float kept = 1.0f;
  if constexpr (SINKS == 1) {
    const Scales scales = merge_maxima(maximum, __fmul_rn(to_float(sinks[head]), LOG2_E));
    sum = merge_sums(sum, 1.0f, scales);
    kept = scales.left;
  }
  return sum == 0.0f ? 0.0f : __fdiv_rn(kept, sum);
}

// -0 + 0 = 0: whether a weight of 0 was added to an exact zero does not show.
__device__ __forceinline__ T finished(float value, float scale) {
  return round_to<T>(__fadd_rn(__fmul_rn(value, scale), 0.0f));
}
