// What a block of paged attention holds in shared memory, and how it gets there.
//
// A tile of keys or values is KV_TILE positions of one KV head, gathered from the pages by
// asynchronous copies of 16 bytes into one of SLOTS slots, which are used in turns: keys of tile 0,
// values of tile 0, keys of tile 1, ... Rows are PAD elements apart, so that eight of them at one
// column lie in different banks.
#pragma once

#include "common.cuh"
#include "kv_check.cuh"
#include "ptx.cuh"

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int KV_TILE = HEAD_DIM <= 128 ? 64 : 32;  // positions; edges are multiples of it
constexpr int SPLIT = 256;                          // positions; edges are multiples of it
constexpr int ROWS = 16 * ROW_TILES;

constexpr int PAD = WIDEST<T>;
constexpr int PITCH = HEAD_DIM + PAD;
constexpr int WEIGHT_PITCH = KV_TILE + PAD;
constexpr int PIECES = HEAD_DIM / WIDEST<T>;  // of 16 bytes, of a head

struct Shared {
  alignas(16) T slots[SLOTS][KV_TILE * PITCH];
  alignas(16) T queries[ROWS * PITCH];
  alignas(16) T weights[ROWS * WEIGHT_PITCH];
  float row_max[WARPS * ROWS];
  float row_sum[WARPS * ROWS];
  int position[ROWS];  // of each row's token; rows beyond the last repeat it
};

// One item of the work list: rows [first_row, first_row + num_rows) of a sequence and KV head, over
// splits [first_split, end_split). Row = token of the sequence's new ones * group + query head of
// the KV head.
//   WHOLE: all of the rows' splits; the result goes to `out`.
//   HEAD: the first of them, merged into one partial result.
//   REST: later ones, each of which makes a partial result.
// Partial results have num_rows rows each, one result after another from `partial_row` on.
enum Kind { WHOLE = 0, HEAD = 1, REST = 2 };

struct Work {
  int sequence;
  int kv_head;
  int first_row;
  int num_rows;
  int first_split;
  int end_split;
  int partial_row;
  int kind;
};

__device__ __forceinline__ Work load_work(const int* list, int i) {
  const Pack<int, 4> a = load_pack<4>(list, 2LL * i);
  const Pack<int, 4> b = load_pack<4>(list, 2LL * i + 1);
  return {a.at[0], a.at[1], a.at[2], a.at[3], b.at[0], b.at[1], b.at[2], b.at[3]};
}

// The keys and values that an item reads, and where.
struct Context {
  const T* k_head;    // of the item's KV head in block 0, [BLOCK_SIZE, HEAD_DIM]
  const T* v_head;    // the same
  const int* blocks;  // the sequence's row of the block table
  int block_stride;   // elements from a block to the next, Hkv BLOCK_SIZE HEAD_DIM
  int begin;          // positions [begin, end) are read; others count as zeros
  int end;
#if KV_SANITIZER
  KVReads reads;
#endif
};

// Starts to copy tile `tile` of a head's keys or values into a slot. What lies outside of the
// context becomes zeros, whatever the cache and the block table hold there: NaN times a weight of 0
// is NaN. Block numbers are looked up GROUP at a time, so that one does not wait for another.
__device__ __forceinline__ void load_tile(T* slot, const T* head, const Context& context,
                                          int tile) {
  constexpr int PASSES = (KV_TILE * PIECES + THREADS - 1) / THREADS;
  constexpr int GROUP = 4;
#pragma unroll
  for (int first = 0; first < PASSES; first += GROUP) {
    int block[GROUP];
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
      const int position = tile * KV_TILE + ((first + j) * THREADS + int(threadIdx.x)) / PIECES;
      const bool inside = position >= context.begin && position < context.end;
      block[j] = first + j < PASSES && inside ? context.blocks[position / BLOCK_SIZE] : -1;
    }
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
      const int i = (first + j) * THREADS + threadIdx.x;
      if (first + j >= PASSES || (KV_TILE * PIECES % THREADS != 0 && i >= KV_TILE * PIECES)) break;
      const int row = i / PIECES;
      const int start = i % PIECES * WIDEST<T>;
      const int offset = (tile * KV_TILE + row) % BLOCK_SIZE * HEAD_DIM + start;
      const bool inside = block[j] >= 0;
      const T* from = inside ? head + ((long long)block[j] * context.block_stride + offset) : head;
#if KV_SANITIZER
      if (inside && start == 0) check_read(context.reads, from - head, tile * KV_TILE + row);
#endif
      copy_async_or_zero<16>(slot + row * PITCH + start, from, inside ? 16 : 0);
    }
  }
}

// Starts to copy the queries of an item's rows; up to a whole number of row tiles they are zeros.
// `queries`: the sequence's first new token, query head 0 of the KV head.
__device__ __forceinline__ void load_queries(Shared& shared, const T* queries, const Work& work,
                                             int group, long long token_stride) {
  const int num_pieces = (work.num_rows + 15) / 16 * 16 * PIECES;
#pragma unroll 1
  for (int i = threadIdx.x; i < num_pieces; i += THREADS) {
    const int row = i / PIECES;
    const int start = i % PIECES * WIDEST<T>;
    const bool inside = row < work.num_rows;
    const int number = work.first_row + row;
    const T* from = queries;
    if (inside) from += number / group * token_stride + number % group * HEAD_DIM + start;
    copy_async_or_zero<16>(shared.queries + row * PITCH + start, from, inside ? 16 : 0);
  }
}

// The slots in turns. Every thread of the block makes all of the calls.
class Slots {
 public:
  // Starts the first loads of an item, tiles [first_tile, end_tile). Copies that were started
  // before belong to the first of them.
  __device__ __forceinline__ Slots(Shared& shared, const Context& context, int first_tile,
                                   int end_tile)
      : shared_(shared), context_(context), stage_(2 * first_tile), end_(2 * end_tile) {
#pragma unroll
    for (int i = 0; i < SLOTS - 1; ++i) load_next();
  }

  // The next tile: keys and values by turns. The one before is given up, by all threads.
  __device__ __forceinline__ const T* next() {
    copy_async_wait<SLOTS - 2>();
    __syncthreads();
    load_next();
    const T* slot = shared_.slots[used_];
    used_ = used_ + 1 == SLOTS ? 0 : used_ + 1;
    return slot;
  }

 private:
  __device__ __forceinline__ void load_next() {
    if (stage_ < end_) {
      const T* head = stage_ % 2 == 0 ? context_.k_head : context_.v_head;
      load_tile(shared_.slots[filled_], head, context_, stage_ / 2);
    }
    copy_async_commit();
    ++stage_;
    filled_ = filled_ + 1 == SLOTS ? 0 : filled_ + 1;
  }

  Shared& shared_;
  const Context& context_;
  int stage_;
  int end_;
  int filled_ = 0;
  int used_ = 0;
};
