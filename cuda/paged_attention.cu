// Causal attention over a paged cache, for sequences with one new token and with many alike.
//
// For each new token at position p of its sequence, and each query head h, with g = h / (Hq / Hkv):
//   s[j] = scale q . k[g, j]                   for all positions j <= p
//   out  = sum_j e^s[j] v[g, j] / sum_j e^s[j]
// SOFTCAP: s[j] = softcap tanh(scale q . k / softcap). WINDOW: only j > p - window. SINKS: the sum
// below the line has one more term, e^sinks[h].
//
// Arrays: out T [num_tokens, Hq HEAD_DIM]; qkv T [num_tokens, (Hq + 2 Hkv) HEAD_DIM], of which the
// queries are read; k_cache, v_cache T [num_blocks, Hkv, BLOCK_SIZE, HEAD_DIM], where the new
// tokens' keys and values are already; block_table int32 [num_seqs, max_blocks]; query_start int32
// [num_seqs + 1]; context_len int32 [num_seqs]: sequence s has the tokens query_start[s] up to
// query_start[s + 1], at the last of its context_len[s] positions. Slots that no row of a tile of
// work sees may hold anything, NaN too, and so may block numbers of no such slot. (What one of the
// tile's rows sees and another does not, a later token of the same sequence, must be finite.)
// Contiguous, each aligned to 16 bytes. No array overlaps another.
//
// Work: a row is a token and one of the query heads that share a KV head; up to ROWS rows of a
// sequence and KV head are one tile of work. Its positions are cut into splits of SPLIT, whose
// edges are multiples of SPLIT from 0. `work_list` has items, each some of the splits of one tile
// (see Work in attention_tiles.cuh); block b does the items block_work[b] up to block_work[b + 1].
// Where a tile's splits are in more than one item, the items leave partial results, and
// merge_attention_splits makes `out` of them: merge_rows int32 [num_merge_rows[0], 4] has the row
// of `out` as [num_tokens Hq, HEAD_DIM], the row's first partial result, from one to the next, and
// how many.
//
// Order: fixed for each row, whatever else is computed and however the work is divided. In a split,
// tiles of KV_TILE positions in ascending order, into a state that begins empty: scores by
// ascending dimension, weights rounded to T for the product with the values (not for their sum),
// by ascending position. The sum goes by thread, then over the 4 threads of a row in a warp, then
// over the 4 warps. Then the splits' states in ascending order, merged by one formula. Tiles and
// splits without any key for a row leave it as it is. All in float, `out` rounded once. The bits
// hold for one device: exp2f, tanhf and the sums within mma may differ on another.
//
// paged_attention: grid any, 128 threads, sizeof(Shared) bytes of dynamic shared memory.
// merge_attention_splits: grid any, 128 threads, a warp a row.
//
// Defines: DTYPE; HEAD_DIM, a multiple of 16, at most 256; BLOCK_SIZE, a power of two, 8 to 128;
// ROW_TILES 1, 2 or 4: ROWS is 16 times that; SLOTS 2 to 8, tiles of keys or values in shared
// memory; WINDOW, SOFTCAP, SINKS, KV_SANITIZER: 1, or 0 (default), without the parameters.
//
// Cost: positions * 2 HEAD_DIM sizeof(T) bytes a sequence, KV head and tile of rows, bound by
// memory while rows are few; 4 HEAD_DIM FLOP a row and position.
#ifndef HEAD_DIM
#error "define HEAD_DIM, the elements of a head"
#endif
#ifndef BLOCK_SIZE
#error "define BLOCK_SIZE, the positions of a block of the cache"
#endif
#ifndef ROW_TILES
#error "define ROW_TILES, tiles of 16 rows that a block computes at a time"
#endif
#ifndef SLOTS
#error "define SLOTS, tiles of keys or values that fit in shared memory"
#endif
#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef SINKS
#define SINKS 0
#endif
#ifndef KV_SANITIZER
#define KV_SANITIZER 0
#endif
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM >= 16 && HEAD_DIM <= 256,
              "HEAD_DIM is a multiple of 16, at most 256");
static_assert(BLOCK_SIZE >= 8 && BLOCK_SIZE <= 128 && (BLOCK_SIZE & (BLOCK_SIZE - 1)) == 0,
              "BLOCK_SIZE is a power of two, 8 to 128");
static_assert(ROW_TILES == 1 || ROW_TILES == 2 || ROW_TILES == 4, "ROW_TILES is 1, 2 or 4");
static_assert(SLOTS >= 2 && SLOTS <= 8, "SLOTS is 2 to 8");
static_assert((WINDOW | SOFTCAP | SINKS) <= 1, "WINDOW, SOFTCAP and SINKS are 0 or 1");

#include "attention_rows.cuh"

// Of a multiprocessor; left to itself the compiler spills to get by with fewer registers.
constexpr int MIN_BLOCKS = 2;
constexpr int MERGE_BLOCKS = 4;

extern "C" __global__ __launch_bounds__(THREADS, MIN_BLOCKS) void paged_attention(
    T* __restrict__ out,                    // [num_tokens, Hq HEAD_DIM]
    float* __restrict__ partial_values,     // [num_partial_rows, HEAD_DIM]
    float* __restrict__ partial_sums,       // [num_partial_rows, 2], maximum and sum
    const T* __restrict__ qkv,              // [num_tokens, (Hq + 2 Hkv) HEAD_DIM]
    const T* __restrict__ k_cache,          // [num_blocks, Hkv, BLOCK_SIZE, HEAD_DIM]
    const T* __restrict__ v_cache,          // [num_blocks, Hkv, BLOCK_SIZE, HEAD_DIM]
    const int* __restrict__ block_table,    // [num_seqs, max_blocks]
    const int* __restrict__ query_start,    // [num_seqs + 1]
    const int* __restrict__ context_len,    // [num_seqs]
    const int* __restrict__ block_work,     // [gridDim.x + 1]
    const int* __restrict__ work_list,      // [block_work[gridDim.x], 8]
#if SINKS
    const T* __restrict__ sinks,  // [Hq]
#endif
    int num_q_heads,
    int num_kv_heads,
    int max_blocks,
#if WINDOW
    int window,
#endif
#if SOFTCAP
    float softcap,
#endif
#if KV_SANITIZER
    float scale,
    const int* __restrict__ slot_tags,  // [num_slots], see kv_check.cuh
    const int* __restrict__ read_tags,  // [num_seqs, max_blocks]
    int* __restrict__ report,           // [8]
    long long num_slots,
    int step) {
#else
    float scale) {
#endif
#if !SINKS
  const T* sinks = nullptr;
#endif
  extern __shared__ float4 shared_memory[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
  Rules rules;
#if WINDOW
  rules.window = window;
#endif
#if SOFTCAP
  rules.score_scale = __fdiv_rn(scale, softcap);
  rules.capped_scale = __fmul_rn(softcap, LOG2_E);
#else
  rules.score_scale = __fmul_rn(scale, LOG2_E);
#endif
  const int group = num_q_heads / num_kv_heads;
  const long long token_size = (long long)(num_q_heads + 2 * num_kv_heads) * HEAD_DIM;
  const int end_work = block_work[blockIdx.x + 1];

#pragma unroll 1
  for (int i = block_work[blockIdx.x]; i < end_work; ++i) {
    const Work work = load_work(work_list, i);
    const int num_row_tiles = (work.num_rows + 15) / 16;
    const long long first_token = query_start[work.sequence];
    const int first_position =
        context_len[work.sequence] - (query_start[work.sequence + 1] - query_start[work.sequence]);

    Context context;
    context.k_head = k_cache + (long long)work.kv_head * BLOCK_SIZE * HEAD_DIM;
    context.v_head = v_cache + (long long)work.kv_head * BLOCK_SIZE * HEAD_DIM;
    context.blocks = block_table + (long long)work.sequence * max_blocks;
    context.block_stride = num_kv_heads * BLOCK_SIZE * HEAD_DIM;
    context.begin = 0;
#if WINDOW
    context.begin = max(0, first_position + work.first_row / group - window + 1);
#endif
    context.end = first_position + (work.first_row + work.num_rows - 1) / group + 1;
#if KV_SANITIZER
    const long long block_elements = (long long)num_kv_heads * BLOCK_SIZE * HEAD_DIM;
    const int* tags = read_tags + (long long)work.sequence * max_blocks;
    context.reads = {slot_tags, tags, report, num_slots, block_elements, max_blocks,
                     work.sequence, step};
#endif

    if (threadIdx.x < ROWS) {
      const int row = min(int(threadIdx.x), work.num_rows - 1);
      shared.position[threadIdx.x] = first_position + (work.first_row + row) / group;
    }
    const long long head = (long long)work.kv_head * group * HEAD_DIM;
    load_queries(shared, qkv + first_token * token_size + head, work, group, token_size);
    const int first_tile = max(work.first_split * SPLIT, context.begin) / KV_TILE;
    const int end_tile = (min(work.end_split * SPLIT, context.end) + KV_TILE - 1) / KV_TILE;
    Slots slots(shared, context, first_tile, end_tile);

    States split;
    States merged;
    clear(split);
    clear(merged);
    long long partial_row = work.partial_row;
#pragma unroll 1
    for (int tile = first_tile; tile < end_tile; ++tile) {
      const T* keys = slots.next();
      const int first = tile * KV_TILE;
      const unsigned active = active_row_tiles(shared, num_row_tiles, first, rules);
      float scores[ROW_TILES][SLICE_TILES][4] = {};
      add_scores(scores, shared.queries, keys, active);
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
        if (is_active(active, r)) finish_scores(scores[r], shared, r, first, rules);
      }
      __syncthreads();
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
        if (is_active(active, r)) weigh(scores[r], shared, split, r);
      }
      const T* values = slots.next();  // its barrier is also the one behind the weights
      add_values(split.values, shared.weights, values, active);

      const bool is_last = tile + 1 == end_tile;
      if (!is_last && (first + KV_TILE) % SPLIT != 0) continue;
      close_split(shared, split, merged, num_row_tiles);
      if (work.kind == REST || (work.kind == HEAD && is_last)) {
        write_partial(partial_values, partial_sums, merged, partial_row, work.num_rows);
        partial_row += work.num_rows;
        clear(merged);
      }
    }
    if (work.kind == WHOLE) {
      const T* head_sinks = SINKS == 1 ? sinks + work.kv_head * group : sinks;
      write_out(out + first_token * num_q_heads * HEAD_DIM + head, merged, work, head_sinks, group,
                num_q_heads);
    }
  }
}

extern "C" __global__ __launch_bounds__(THREADS, MERGE_BLOCKS) void merge_attention_splits(
    T* __restrict__ out,                       // [num_tokens, Hq HEAD_DIM]
    const float* __restrict__ partial_values,  // [num_partial_rows, HEAD_DIM]
    const float* __restrict__ partial_sums,    // [num_partial_rows, 2], maximum and sum
    const int* __restrict__ num_merge_rows,    // [1]
    const int* __restrict__ merge_rows,        // [num_merge_rows[0], 4]
#if SINKS
    const T* __restrict__ sinks,  // [Hq]
#endif
    int num_q_heads) {
#if !SINKS
  const T* sinks = nullptr;
#endif
  constexpr int VECTORS = HEAD_DIM / 4;
  constexpr int LANE_VECTORS = (VECTORS + 31) / 32;
  const int lane = threadIdx.x % 32;
  const int num_rows = num_merge_rows[0];
#pragma unroll 1
  for (int i = blockIdx.x * WARPS + threadIdx.x / 32; i < num_rows; i += gridDim.x * WARPS) {
    const Pack<int, 4> row = load_pack<4>(merge_rows, i);
    float maximum = minus_infinity();
    float sum = 0.0f;
    Pack<float, 4> values[LANE_VECTORS] = {};
#pragma unroll 4
    for (int part = 0; part < row.at[3]; ++part) {
      const long long from = row.at[1] + (long long)part * row.at[2];
      const Pack<float, 2> state = load_pack<2>(partial_sums, from);
      Pack<float, 4> more[LANE_VECTORS];
#pragma unroll
      for (int v = 0; v < LANE_VECTORS; ++v) {
        const int vector = v * 32 + lane;
        if (vector < VECTORS) more[v] = load_pack<4>(partial_values + from * HEAD_DIM, vector);
      }
      const Scales scales = merge_maxima(maximum, state.at[0]);
      sum = merge_sums(sum, state.at[1], scales);
#pragma unroll
      for (int v = 0; v < LANE_VECTORS; ++v) {
        if (v * 32 + lane >= VECTORS) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          values[v].at[j] = merge_sums(values[v].at[j], more[v].at[j], scales);
        }
      }
    }
    const float scale = output_scale(maximum, sum, sinks, row.at[0] % num_q_heads);
#pragma unroll
    for (int v = 0; v < LANE_VECTORS; ++v) {
      const int vector = v * 32 + lane;
      if (vector >= VECTORS) continue;
      Pack<T, 4> rounded;
#pragma unroll
      for (int j = 0; j < 4; ++j) rounded.at[j] = finished(values[v].at[j], scale);
      store_pack<4>(out + (long long)row.at[0] * HEAD_DIM, vector, rounded);
    }
  }
}

/* check -DDTYPE=f32 -DHEAD_DIM=16 -DBLOCK_SIZE=16 -DROW_TILES=1 -DSLOTS=2
length, heads, dim = 300, 2, 16  # one new token, two query heads, one KV head, two splits
shared = 2 * 64 * 20 * 4 + 16 * 20 * 4 + 16 * 68 * 4 + (2 * 4 + 1) * 16 * 4  # sizeof(Shared)
qkv = normal(1, (heads + 2) * dim)
k_cache, v_cache = normal(20, 1, 16, dim), normal(20, 1, 16, dim)
table = array(np.arange(19)[::-1].reshape(1, 19), dtype=np.int32)
for cache in (k_cache, v_cache):
    cache[0, 0, 12:] = np.nan  # the last block's slots behind position 299
query_start, context_len = array([0, 1], dtype=np.int32), array([length], dtype=np.int32)

keys, values = (np.float64(c[table[0]]).reshape(-1, dim)[:length] for c in (k_cache, v_cache))
weights = np.exp(np.float64(qkv[0, : heads * dim]).reshape(heads, dim) @ keys.T * 0.25)
right = (weights @ values / weights.sum(-1, keepdims=True)).reshape(1, heads * dim)

def attend(out, block_work, work):
    work, block_work = array(work, dtype=np.int32), array(block_work, dtype=np.int32)
    arrays = (out, partial, sums, qkv, k_cache, v_cache, table, query_start, context_len)
    sizes = np.int32(heads), np.int32(1), np.int32(19)
    paged_attention((len(block_work) - 1,), (128,),
                    (*arrays, block_work, work, *sizes, np.float32(0.25)), shared_mem=shared)

whole, out = empty(1, heads * dim), empty(1, heads * dim)
partial, sums = empty(4, dim), empty(4, 2)
attend(whole, [0, 1], [[0, 0, 0, 2, 0, 2, 0, 0]])
expect(whole, right)

attend(out, [0, 1, 2], [[0, 0, 0, 2, 0, 1, 0, 1], [0, 0, 0, 2, 1, 2, 2, 2]])
rows = array([[0, 0, 2, 2], [1, 1, 2, 2]], dtype=np.int32)
count = array([2], dtype=np.int32)
merge_attention_splits((1,), (128,), (out, partial, sums, count, rows, np.int32(heads)))
expect(out, whole, tolerance=0)  # the same bits
*/
