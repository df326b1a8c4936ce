// Whole blocks of a KV cache, moved.
//
//   copy_blocks:     cache[destination] = cache[source] of K and of V of one layer, in one launch
//   gather_blocks:   staging[i] = cache[blocks[i]]
//   scatter_blocks:  cache[blocks[i]] = staging[i]
//
// Arrays: k_cache, v_cache, cache T [num_blocks, block elements], block elements = Hkv * block_size
// * head_dim; staging T [n, block elements]; copies int32 [n, 2], (source, destination), no
// destination twice or also a source; blocks int32 [n], in scatter_blocks none twice; all in [0,
// num_blocks). Contiguous, each aligned to 16 bytes; block elements are a multiple of 8, as a block
// has 8 tokens or more. staging and cache do not overlap.
//
// Grid: copy_blocks (n, any, 2), K and then V; the others (n, any); the second for as many blocks
// as share one block of the cache. Block: any up to 256 threads. Threads take 16 bytes at a time,
// so that ceil(block elements sizeof(T) / 16 / threads) blocks are one such step each. Nothing is
// rounded.
//
// Defines: DTYPE; KV_SANITIZER: 1, or 0 (default), without its parameters. Cost, bytes: 2 sizeof(T) an element; bound by memory.
#include "common.cuh"

#ifndef KV_SANITIZER
#define KV_SANITIZER 0
#endif

constexpr int MAX_THREADS = 256;

// One block of a cache, by the blocks (x, 0 .. gridDim.y - 1) of the grid.
__device__ __forceinline__ void copy_block(T* out, const T* in, long long to, long long from,
                                           long long block_elements) {
  constexpr int N = WIDEST<T>;
  out += to * block_elements;
  in += from * block_elements;
  const long long step = (long long)gridDim.y * blockDim.x;
  long long i = (long long)blockIdx.y * blockDim.x + threadIdx.x;
#pragma unroll 1
  for (; i < block_elements / N; i += step) store_pack<N>(out, i, load_pack<N>(in, i));
}

extern "C" __global__ __launch_bounds__(MAX_THREADS) void copy_blocks(
    T* k_cache,                      // [num_blocks, k_elements]
    T* v_cache,                      // [num_blocks, v_elements]
    const int* __restrict__ copies,  // [n, 2], (source, destination)
    long long k_elements,
#if KV_SANITIZER
    long long v_elements,
    int* __restrict__ slot_tags,        // [num_blocks block_size], see kv_check.cuh
    const int* __restrict__ copy_tags,  // [n, 2]
    int block_size,
    int step) {
#else
    long long v_elements) {
#endif
  const long long pair = blockIdx.x;
  const int source = copies[2 * pair];
  const int destination = copies[2 * pair + 1];
#if KV_SANITIZER
  if (step >= 0 && blockIdx.y == 0 && blockIdx.z == 0) {
    const int* from = slot_tags + (long long)source * block_size;
    int* to = slot_tags + (long long)destination * block_size;
    for (int i = threadIdx.x; i < block_size; i += blockDim.x) {
      to[i] = from[i] == copy_tags[2 * pair] + i ? copy_tags[2 * pair + 1] + i : 0;
    }
  }
#endif
  T* cache = blockIdx.z == 0 ? k_cache : v_cache;
  copy_block(cache, cache, destination, source, blockIdx.z == 0 ? k_elements : v_elements);
}

extern "C" __global__ __launch_bounds__(MAX_THREADS) void gather_blocks(
    T* __restrict__ staging,         // [n, block_elements]
    const T* __restrict__ cache,     // [num_blocks, block_elements]
    const int* __restrict__ blocks,  // [n]
    long long block_elements) {
  copy_block(staging, cache, blockIdx.x, blocks[blockIdx.x], block_elements);
}

extern "C" __global__ __launch_bounds__(MAX_THREADS) void scatter_blocks(
    T* __restrict__ cache,           // [num_blocks, block_elements]
    const T* __restrict__ staging,   // [n, block_elements]
    const int* __restrict__ blocks,  // [n]
    long long block_elements) {
  copy_block(cache, staging, blocks[blockIdx.x], blockIdx.x, block_elements);
}

/* check -DDTYPE=bf16
heads_times_dim = 3 * 8  # of one token
k, v = normal(6, 8 * heads_times_dim), normal(6, 8 * heads_times_dim)
right_k, right_v = k.copy(), v.copy()
copies = array([[0, 4], [0, 2], [5, 1]])
for source, destination in copies:
    right_k[destination], right_v[destination] = k[source], v[source]
elements = np.int64(k.shape[1])
copy_blocks((3, 2, 2), (32,), (k, v, copies, elements, elements))
expect(k, right_k, tolerance=0)
expect(v, right_v, tolerance=0)

blocks = array([5, 0, 3])
staging = empty(3, elements)
gather_blocks((3, 1), (32,), (staging, k, blocks, elements))
expect(staging, k[blocks], tolerance=0)

right = v.copy()
right[blocks] = staging
scatter_blocks((3, 1), (32,), (v, staging, blocks, elements))
expect(v, right, tolerance=0)
*/
