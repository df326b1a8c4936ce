// Rows of the embedding table: out[t] = table[clip(ids[t], 0, vocab_size - 1)].
//
// Arrays: out T [num_tokens, hidden]; ids int32 [num_tokens]; table T [vocab_size, hidden].
// Contiguous, each aligned to 16 bytes. out overlaps nothing.
//
// Ids outside the vocabulary are clipped to it, as NumPy's mode="clip"; vocab_size is at least 1.
//
// Grid: (num_tokens). Block: any up to 256 threads; one block a row. Nothing is rounded.
//
// Define: DTYPE. Cost: 2 hidden sizeof(T) bytes a token; bound by memory.
#include "rows.cuh"

constexpr int MAX_THREADS = 256;

extern "C" __global__ __launch_bounds__(MAX_THREADS) void embedding(
    T* __restrict__ out,          // [num_tokens, hidden]
    const int* __restrict__ ids,  // [num_tokens]
    const T* __restrict__ table,  // [vocab_size, hidden]
    int vocab_size,
    int hidden) {
  copy_row(out, table, blockIdx.x, clip_row(ids[blockIdx.x], vocab_size), hidden);
}

/* check -DDTYPE=f16
vocab_size = 50
ids = array([7, 49, 0, -1, 50, 7])  # two lie outside and are clipped
for hidden in (64, 13):
    table, out = normal(vocab_size, hidden), empty(ids.size, hidden)
    embedding((ids.size,), (32,), (out, ids, table, np.int32(vocab_size), np.int32(hidden)))
    expect(out, table[ids.clip(0, vocab_size - 1)], tolerance=0)
*/
