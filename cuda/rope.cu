// Rotary positions, and the cache write of the same tokens.
//
// For each token t and each query and key head, with p = positions[t] and each i < ROTARY_DIM / 2:
//   a = head[i], b = head[i + ROTARY_DIM / 2]                       ("rotate half")
//   head[i]                  = a cos[p, i] - b sin[p, i]
//   head[i + ROTARY_DIM / 2] = b cos[p, i] + a sin[p, i]
// in place; elements from ROTARY_DIM on stay. Then the token's key and value heads go to slot
// slot_mapping[t] = block * BLOCK_SIZE + offset of the caches; slots of -1 are skipped.
//
// Arrays: qkv T [num_tokens, (Hq + 2 Hkv) HEAD_DIM], query heads, key heads, value heads; k_cache,
// v_cache T [num_blocks, Hkv, BLOCK_SIZE, HEAD_DIM]; table float32 [2, max_positions, HALF],
// cosines and then sines, HALF = ROTARY_DIM / 2; positions int32 [num_tokens], in [0,
// max_positions); slot_mapping int64 [num_tokens], below num_blocks * BLOCK_SIZE, no slot twice.
// Contiguous, each aligned to 16 bytes. No array overlaps another.
//
// Grid: (num_tokens). Block: any up to 256 threads, one block a token; WIDTH elements of a head are
// one piece of work, WIDTH the largest power of two that divides the half and fits in 16 bytes.
//
// Rounding: float, each product and sum rounded, to T once; the cache holds the rounded keys.
//
// Defines: DTYPE; HEAD_DIM, even, 2 to 512; BLOCK_SIZE, a power of two, 8 to 128; ROTARY_DIM, even,
// at most HEAD_DIM, the default; KV_SANITIZER: 1, or 0 (default), without its parameters.
//
// Cost, bytes a token: (2 Hq + 5 Hkv) HEAD_DIM sizeof(T) + 4 ROTARY_DIM. Bound by memory.
#include "common.cuh"

#ifndef HEAD_DIM
#error "define HEAD_DIM, the elements of a head"
#endif
#ifndef BLOCK_SIZE
#error "define BLOCK_SIZE, the tokens of a cache block"
#endif
#ifndef ROTARY_DIM
#define ROTARY_DIM HEAD_DIM
#endif
#ifndef KV_SANITIZER
#define KV_SANITIZER 0
#endif
static_assert(HEAD_DIM % 2 == 0 && HEAD_DIM >= 2 && HEAD_DIM <= 512, "HEAD_DIM: even, 2 to 512");
static_assert(BLOCK_SIZE >= 8 && BLOCK_SIZE <= 128 && (BLOCK_SIZE & (BLOCK_SIZE - 1)) == 0,
              "BLOCK_SIZE: a power of two from 8 to 128");
static_assert(ROTARY_DIM % 2 == 0 && ROTARY_DIM >= 2 && ROTARY_DIM <= HEAD_DIM,
              "ROTARY_DIM: even, 2 to HEAD_DIM");

constexpr int MAX_THREADS = 256;
constexpr int MIN_BLOCKS = 4;  // 64 registers; left to itself the compiler spills to get by with 40
constexpr int HALF = ROTARY_DIM / 2;
constexpr int REST = HEAD_DIM - ROTARY_DIM;

// The largest power of two that divides a and b, at most `most`.
__device__ constexpr int common_width(int a, int b, int most) {
  int width = most;
  while (a % width != 0 || b % width != 0) width /= 2;
  return width;
}

// Every head begins at a multiple of HEAD_DIM, every half at a multiple of HALF after it.
constexpr int WIDTH = common_width(HALF, HEAD_DIM, WIDEST<T>);
constexpr int TABLE_WIDTH = WIDTH < 4 ? WIDTH : 4;  // floats of the table read at a time

struct Turn {
  float cos[WIDTH];
  float sin[WIDTH];
};

// cos and sin of the elements [i, i + WIDTH) of the half, at one position.
__device__ __forceinline__ Turn load_turn(const float* table, int position, int max_positions,
                                          int i) {
  const float* cosines = table + (long long)position * HALF + i;
  const float* sines = cosines + (long long)max_positions * HALF;
  Turn turn;
#pragma unroll
  for (int first = 0; first < WIDTH; first += TABLE_WIDTH) {
    const Pack<float, TABLE_WIDTH> c = load_pack<TABLE_WIDTH>(cosines + first, 0);
    const Pack<float, TABLE_WIDTH> s = load_pack<TABLE_WIDTH>(sines + first, 0);
#pragma unroll
    for (int j = 0; j < TABLE_WIDTH; ++j) {
      turn.cos[first + j] = c.at[j];
      turn.sin[first + j] = s.at[j];
    }
  }
  return turn;
}

// Turns a and b, the same WIDTH elements of both halves of a head.
__device__ __forceinline__ void rotate(Pack<T, WIDTH>& a, Pack<T, WIDTH>& b, const Turn& turn) {
#pragma unroll
  for (int j = 0; j < WIDTH; ++j) {
    const float x = to_float(a.at[j]);
    const float y = to_float(b.at[j]);
    a.at[j] = round_to<T>(__fsub_rn(__fmul_rn(x, turn.cos[j]), __fmul_rn(y, turn.sin[j])));
    b.at[j] = round_to<T>(__fadd_rn(__fmul_rn(y, turn.cos[j]), __fmul_rn(x, turn.sin[j])));
  }
}

// Where the head h of a slot begins in a cache, in elements.
__device__ __forceinline__ long long cache_start(long long slot, int h, int num_kv_heads) {
  const long long block = slot / BLOCK_SIZE;
  const long long offset = slot % BLOCK_SIZE;
  return ((block * num_kv_heads + h) * BLOCK_SIZE + offset) * HEAD_DIM;
}

// Elements [FIRST, FIRST + COUNT) of each head of `heads`, to the slot's place in the cache.
template <int FIRST, int COUNT>
__device__ __forceinline__ void write_slot(T* cache, const T* heads, long long slot,
                                           int num_kv_heads) {
  constexpr int PIECES = COUNT / WIDTH;
#pragma unroll 1
  for (int i = threadIdx.x; i < num_kv_heads * PIECES; i += blockDim.x) {
    const int h = i / PIECES;
    const int start = FIRST + i % PIECES * WIDTH;
    store_pack<WIDTH>(cache + cache_start(slot, h, num_kv_heads) + start, 0,
                      load_pack<WIDTH>(heads + h * HEAD_DIM + start, 0));
  }
}

extern "C" __global__ __launch_bounds__(MAX_THREADS, MIN_BLOCKS) void rope_and_cache(
    T* __restrict__ qkv,                         // [num_tokens, (Hq + 2 Hkv) HEAD_DIM], in place
    T* __restrict__ k_cache,                     // [num_blocks, Hkv, BLOCK_SIZE, HEAD_DIM]
    T* __restrict__ v_cache,                     // [num_blocks, Hkv, BLOCK_SIZE, HEAD_DIM]
    const float* __restrict__ table,             // [2, max_positions, ROTARY_DIM / 2]
    const int* __restrict__ positions,           // [num_tokens]
    const long long* __restrict__ slot_mapping,  // [num_tokens]
    int num_q_heads,
    int num_kv_heads,
#if KV_SANITIZER
    int max_positions,
    int* __restrict__ slot_tags,         // [num_blocks BLOCK_SIZE], see kv_check.cuh
    const int* __restrict__ write_tags,  // [num_tokens]
    int step) {
#else
    int max_positions) {
#endif
  const long long token = blockIdx.x;
  const int position = positions[token];
  const long long slot = slot_mapping[token];
  T* queries = qkv + token * (num_q_heads + 2 * num_kv_heads) * HEAD_DIM;
  T* keys = queries + num_q_heads * HEAD_DIM;
  T* values = keys + num_kv_heads * HEAD_DIM;

  constexpr int PIECES = HALF / WIDTH;
#pragma unroll 1
  for (int i = threadIdx.x; i < (num_q_heads + num_kv_heads) * PIECES; i += blockDim.x) {
    const int h = i / PIECES;
    const int start = i % PIECES * WIDTH;
    T* low = queries + h * HEAD_DIM + start;
    Pack<T, WIDTH> a = load_pack<WIDTH>(low, 0);
    Pack<T, WIDTH> b = load_pack<WIDTH>(low + HALF, 0);
    rotate(a, b, load_turn(table, position, max_positions, start));
    store_pack<WIDTH>(low, 0, a);
    store_pack<WIDTH>(low + HALF, 0, b);
    if (h >= num_q_heads && slot >= 0) {
      T* key = k_cache + cache_start(slot, h - num_q_heads, num_kv_heads) + start;
      store_pack<WIDTH>(key, 0, a);
      store_pack<WIDTH>(key + HALF, 0, b);
    }
  }
  if (slot < 0) return;
#if KV_SANITIZER
  if (threadIdx.x == 0 && step >= 0) slot_tags[slot] = write_tags[token];
#endif
  write_slot<0, HEAD_DIM>(v_cache, values, slot, num_kv_heads);
  if constexpr (REST > 0) {  // what of a key does not turn
    write_slot<ROTARY_DIM, REST>(k_cache, keys, slot, num_kv_heads);
  }
}

/* check -DDTYPE=f32 -DHEAD_DIM=24 -DBLOCK_SIZE=8 -DROTARY_DIM=16
tokens, q_heads, kv_heads, half, max_positions = 5, 4, 2, 8, 40
heads = q_heads + 2 * kv_heads
qkv = normal(tokens, heads, 24)
k_cache, v_cache = empty(3, kv_heads, 8, 24), empty(3, kv_heads, 8, 24)
positions = integers(0, max_positions, tokens)
slots = array([9, -1, 0, 23, 3], dtype=np.int64)  # the second token is not cached
angle = np.arange(max_positions)[:, None] * 100.0 ** -np.linspace(0, 1, half)
table = array(np.stack([np.cos(angle), np.sin(angle)]), dtype=f32)

right = np.float64(qkv)
cos, sin = np.float64(table)[:, positions, None]
a, b = right[:, : q_heads + kv_heads, :half], right[:, : q_heads + kv_heads, half : 2 * half]
a[...], b[...] = a * cos - b * sin, b * cos + a * sin
keys, values = np.array(k_cache), np.array(v_cache)
for token, slot in enumerate(slots):
    if slot >= 0:
        keys[slot // 8, :, slot % 8] = right[token, q_heads : q_heads + kv_heads]
        values[slot // 8, :, slot % 8] = right[token, q_heads + kv_heads :]

sizes = np.int32(q_heads), np.int32(kv_heads), np.int32(max_positions)
rope_and_cache((tokens,), (64,), (qkv, k_cache, v_cache, table, positions, slots, *sizes))
expect(qkv, right)
expect(k_cache, keys)  # slots of no token are still NaN
expect(v_cache, values)
*/
