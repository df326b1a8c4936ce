// Rows of one array, copied to another by number: what embedding_packed and gather_rows share.
#pragma once

#include "common.cuh"

// Numbers outside [0, count) become the nearest inside, as NumPy's mode="clip".
__device__ __forceinline__ int clip_row(int row, int count) {
  return max(0, min(row, count - 1));
}

template <int N>
__device__ __forceinline__ void copy_packs(T* out, const T* in, int size) {
#pragma unroll 1
  for (int i = threadIdx.x; i < size / N; i += blockDim.x) {
    store_pack<N>(out, i, load_pack<N>(in, i));
  }
}

// One row of `size` elements, by the whole block.
__device__ __forceinline__ void copy_row(T* out, const T* in, long long to, long long from,
                                         int size) {
  if (rows_are_aligned<T>(size)) {
    copy_packs<WIDEST<T>>(out + to * size, in + from * size, size);
  } else {
    copy_packs<1>(out + to * size, in + from * size, size);
  }
}
