// Log probabilities of one given token a row, and of the likeliest tokens.
//
//   logprob(i) = logit[i] - highest - log(sum over j of exp(logit[j] - highest))
//
// Column 0 is the given token; its rank is the number of tokens at least as likely. Columns 1 to
// count are the likeliest tokens in order, equal ones by id, with ranks 1 to count. In a row whose
// highest logit is no finite number, or that holds a NaN, all tokens count as equal and logprobs
// are NaN.
//
// Arrays: ids, ranks int32 [n, 1 + count]; values float32 [n, 1 + count]; logits float32
// [n, vocab_size], aligned to 16 bytes; token_ids int32 [any]; which int32 [n]: row i is given
// token_ids[which[i]], clipped to [0, vocab_size). count is at most vocab_size.
//
// Grid: (n), one block a row. Block: whole warps, up to 384 threads. A result depends on neither.
//
// Rounding: logit - highest and its exp in float, four neighbouring exps summed in float, rounded
// to multiples of 2^-40 and summed as integers; the rest in double, rounded to float once.
//
// No define. Cost: a row is read 3 times, the first time from memory: 4 vocab_size bytes; twice if
// count is 0. Beyond 4096 tokens each 4096 more take 2 rounds or more. Shared memory 35 KiB.
#include "sampling_search.cuh"

constexpr int MAX_THREADS = 384;
constexpr int BLOCKS = 2;  // on a multiprocessor: what the registers of 24 warps come to
constexpr float MASS_UNIT = 1099511627776.0f;  // 2^40

// Places by logit: a key is how many floats lie between it and the highest.
struct ByLogit {
  bool numbers;
  float highest;

  __device__ __forceinline__ unsigned key(float logit) const {
    return numbers ? ordered(highest) - ordered(logit) : 0;
  }
  __device__ __forceinline__ unsigned key_at(float distance) const {
    return key(__fsub_rn(highest, distance));
  }
  __device__ __forceinline__ float floor(unsigned key) const {
    const unsigned top = ordered(highest);
    return numbers && key < top ? from_ordered(top - key) : -infinite();
  }
  __device__ __forceinline__ u64 mass(unsigned) const { return 0; }
};

extern "C" __global__ __launch_bounds__(MAX_THREADS, BLOCKS) void logprobs(
    int* __restrict__ ids,              // [n, 1 + count]
    float* __restrict__ values,         // [n, 1 + count]
    int* __restrict__ ranks,            // [n, 1 + count]
    const float* __restrict__ logits,   // [n, vocab_size]
    const int* __restrict__ token_ids,  // [any]
    const int* __restrict__ which,      // [n]
    int count,
    int vocab_size) {
  __shared__ u64 places[CAPACITY];
  __shared__ u64 parts[2 * SPLITS * MAX_WARPS];
  __shared__ u64 totals[2 * SPLITS];
  __shared__ u64 splits[SPLITS];
  __shared__ u64 partial[MAX_WARPS];
  __shared__ u64 found[1];
  __shared__ int gathered[1];
  __shared__ Part part[1];
  const float* row = logits + (long long)blockIdx.x * vocab_size;
  const long long out = (long long)blockIdx.x * (1 + (long long)count);
  const Highest top = highest_logit(row, vocab_size, partial);
  const bool numbers = isfinite(top.logit);
  const int token = max(0, min(token_ids[which[blockIdx.x]], vocab_size - 1));
  const float own = row[token];

  u64 mass = 0;
  unsigned at_least = 0;
  auto add_up = [&](const float(&quad)[4], int tokens) {
    float weight[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      weight[j] = j < tokens ? expf(__fsub_rn(quad[j], top.logit)) : 0.0f;
      if (j < tokens && quad[j] >= own) ++at_least;
    }
    const float sum =
        __fadd_rn(__fadd_rn(weight[0], weight[1]), __fadd_rn(weight[2], weight[3]));
    mass += (u64)__float2ll_rn(__fmul_rn(sum, MASS_UNIT));
  };
  const Scratch scratch = {places, parts, totals, splits, partial, found, gathered, part};
  const Search<ByLogit> search(row, vocab_size, {numbers, top.logit}, scratch);
  const u64 end = search.end_of(0xffffffffu);
  if (count > 0) {
    const u64 wanted = min(count, CAPACITY);
    search.narrow<false>(0, end, [&](u64) { return wanted; }, add_up);
  } else {
    each_quad<2>(row, vocab_size, [&](int, const float(&quad)[4], int tokens) {
      add_up(quad, tokens);
    });
  }
  const double total = __dmul_rn((double)block_sum(mass, partial), 1.0 / MASS_UNIT);
  const double log_total = numbers ? log(total) : (double)__uint_as_float(0x7fffffffu);
  const u64 rank = numbers ? block_sum(at_least, partial) : vocab_size;
  if (threadIdx.x == 0) {
    ids[out] = token;
    values[out] = (float)__dsub_rn(__fsub_rn(own, top.logit), log_total);
    ranks[out] = (int)rank;
  }
#pragma unroll 1
  for (int done = 0; done < count;) {
    const int wanted = min(count - done, CAPACITY);
    search.gather();
    if (part->first != part->whole_first) {  // the part of the last ones: now the part of them all
      const u64 last = places[wanted - part->count_before - 1];
      __syncthreads();
      if (threadIdx.x == 0) {
        part->last = last;
        part->count = wanted - part->count_before;
      }
      search.gather();
    }
    for (int i = threadIdx.x; i < wanted; i += blockDim.x) {
      const int id = search.id_of(places[i]);
      ids[out + 1 + done + i] = id;
      values[out + 1 + done + i] = (float)__dsub_rn(__fsub_rn(row[id], top.logit), log_total);
      ranks[out + 1 + done + i] = 1 + done + i;
    }
    done += wanted;
    if (done < count) {
      const u64 next = places[wanted - 1] + 1;
      const u64 more = min(count - done, CAPACITY);
      search.narrow<false>(next, end, [&](u64) { return more; }, NOTHING_ELSE);
    }
  }
}

/* check
rows, vocab, count = 3, 1001, 5
logits = np.rint(4 * normal(rows, vocab, dtype=f32)) / 2  # many are equal
token_ids, which = array([900, 3]), array([1, 0, 1])
shape = (rows, 1 + count)
ids, values = empty(*shape, dtype=np.int32), empty(*shape, dtype=f32)
ranks = empty(*shape, dtype=np.int32)
logprobs((rows,), (96,), (ids, values, ranks, logits, token_ids, which, np.int32(count),
                          np.int32(vocab)))
given = token_ids[which][:, None]
chosen = np.concatenate([given, np.argsort(-logits, 1, "stable")[:, :count]], 1)
wide = np.float64(logits)
norm = np.log(np.exp(wide).sum(1, keepdims=True))
expect(ids, chosen)
expect(values, np.take_along_axis(wide, chosen, 1) - norm)
expect(ranks[:, 0], (logits >= np.take_along_axis(logits, given, 1)).sum(1))
expect(ranks[:, 1:], np.broadcast_to(np.arange(1, 6), (rows, 5)))
*/
