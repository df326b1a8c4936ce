// Rows of a packed weight that is also the embedding table: out[t] = table[clip(ids[t])].
//
// Arrays: out T [num_tokens, hidden]; ids int32 [num_tokens]; table T [rows, stride] in the layout
// of packed_weight.cuh, rows at least vocab_size, stride at least hidden. Contiguous, each aligned
// to 16 bytes. out overlaps nothing.
//
// Ids outside the vocabulary are clipped to it, as NumPy's mode="clip"; vocab_size is at least 1.
//
// Grid: (num_tokens). Block: any up to 256 threads; one block a row. Nothing is rounded.
//
// Define: DTYPE. Cost: hidden sizeof(T) bytes written a token and as many read, of 16-bit types
// twice as many, because half of each sector belongs to the row 8 further on; bound by memory.
#include "packed_weight.cuh"
#include "rows.cuh"

constexpr int MAX_THREADS = 256;

// Eight columns: four pairs, which make up 16 bytes of the row.
template <class U>
__device__ __forceinline__ Pack<U, 8> load_packed(const U* table, int row, int column, int stride) {
  Pack<U, 8> pack;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const long long place = packed_pair(row, column + 2 * pair, stride);
    const Pack<U, 2> two = load_pack<2>(table, place / 2);
    pack.at[2 * pair] = two.at[0];
    pack.at[2 * pair + 1] = two.at[1];
  }
  return pack;
}

// The whole row, to an array that is aligned if ALIGNED.
template <bool ALIGNED, class U>
__device__ __forceinline__ void copy_packed(U* out, const U* table, int row, int hidden,
                                            int stride) {
#pragma unroll 1
  for (int i = threadIdx.x; i < (hidden + 7) / 8; i += blockDim.x) {
    const Pack<U, 8> pack = load_packed(table, row, 8 * i, stride);
    if constexpr (ALIGNED) {
      store_pack<8>(out, i, pack);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (8 * i + j < hidden) out[8 * i + j] = pack.at[j];
      }
    }
  }
}

// f32 lies row by row.
template <bool ALIGNED>
__device__ __forceinline__ void copy_packed(float* out, const float* table, int row, int hidden,
                                            int stride) {
  copy_packs<ALIGNED ? WIDEST<T> : 1>(out, table + (long long)row * stride, hidden);
}

extern "C" __global__ __launch_bounds__(MAX_THREADS) void embedding_packed(
    T* __restrict__ out,          // [num_tokens, hidden]
    const int* __restrict__ ids,  // [num_tokens]
    const T* __restrict__ table,  // [rows, stride], packed
    int vocab_size,
    int hidden,
    int stride) {
  T* const to = out + (long long)blockIdx.x * hidden;
  const int row = clip_row(ids[blockIdx.x], vocab_size);
  if (rows_are_aligned<T>(hidden)) {
    copy_packed<true>(to, table, row, hidden, stride);
  } else {
    copy_packed<false>(to, table, row, hidden, stride);
  }
}

/* check -DDTYPE=f32
vocab_size = 50
ids = array([7, 49, 0, -1, 50, 7])  # two lie outside and are clipped
for hidden in (64, 13):
    table, out = normal(64, 64), empty(ids.size, hidden)
    sizes = np.int32(vocab_size), np.int32(hidden), np.int32(64)
    embedding_packed((ids.size,), (32,), (out, ids, table, *sizes))
    expect(out, table[ids.clip(0, vocab_size - 1), :hidden], tolerance=0)
*/
