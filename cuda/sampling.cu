// One token a sample, drawn from a row of logits by the Gumbel-max method.
//
//   greedy (temperature 0):  the highest logit, the lowest id among equals
//   otherwise:               arg max over the kept tokens of scaled + noise, where
//                            scaled = (logit - highest) / temperature, each step rounded to float
//   kept: the tokens no further from the highest than `likely`; of these the top_k likeliest; of
//         these the likeliest whose mass reaches top_p of theirs all; at least one; ties by id
//
// A row whose highest logit is no finite number, or that holds a NaN, gives -1; else forced[s], if
// that is not negative, stands in for the drawn token.
//
// Mass is round(exp(scaled) 2^40) as an integer: sums are exact in any order. A token of mass 0 is
// not kept, unless the row is not limited at all (top_k 0, top_p 1, likely inf).
//
// Noise is as philox.cuh says. Scores are computed in float; those within NOISE_ERROR of the best
// are computed again in double, and the best of these wins: a draw is that of a host computing in
// double but for about one in 10^8, where a thread sees two of them.
//
// Arrays: out int32 [num_samples]; logits float32 [num_logits, vocab_size], aligned to 16 bytes;
// logits_row, top_k, sample_index, output_position, forced int32 [num_samples]; temperature, top_p,
// likely float32 [num_samples], temperature >= 0, top_p <= 1, likely >= 0; seed uint64
// [num_samples]. logits_row in [0, num_logits). top_k 0 means all.
//
// Grid: (num_samples), one block a sample. Block: whole warps, up to 384 threads. A result depends
// on neither: nothing is summed but integers.
//
// Define: REPORT_KEPT = 1 adds the output kept_end, uint64 [num_samples], for tests: the place of
// the last kept token, its distance |scaled| as bits above its id in as many bits as vocab_size - 1
// has; all ones if all are kept.
//
// Cost: a row is read once when greedy, twice when drawn from whole, mostly 3 times with limits:
// once from memory, 4 vocab_size bytes, then from L2. It is 4 or 5 times where fewer than top_k lie
// within FIRST_SPLITS, 6 or 7 where far more than 4096 tokens are kept, up to 11 where nearly all
// are equal. Instructions bound the sums of mass, about 100 a token; memory and latency the rest.
// Shared memory 35 KiB.
#include "philox.cuh"
#include "sampling_mass.cuh"
#include "sampling_search.cuh"

#ifndef REPORT_KEPT
#define REPORT_KEPT 0
#endif
static_assert(REPORT_KEPT == 0 || REPORT_KEPT == 1, "REPORT_KEPT is 0 or 1");

constexpr int MAX_THREADS = 384;
constexpr int BLOCKS = 2;  // on a multiprocessor: what the registers of 24 warps come to
constexpr u64 EVERYTHING = ~0ull;

// So many tokens weigh less than 2^53 together: sums are exact in double.
constexpr u64 EXACT_IN_DOUBLE = 8192;

// Places by scaled logit: a key is the distance |scaled| as bits.
struct ByScaled {
  float highest;
  float temperature;
  const u64* powers;

  __device__ __forceinline__ float scaled(float logit) const {
    return __fdiv_rn(__fsub_rn(logit, highest), temperature);
  }
  __device__ __forceinline__ unsigned key(float logit) const { return key_at(scaled(logit)); }
  __device__ __forceinline__ unsigned key_at(float distance) const {
    return __float_as_uint(distance) & 0x7fffffffu;
  }
  // The errors of the steps of `scaled` and of these are below 2^-22 each.
  __device__ __forceinline__ float floor_at(float distance) const {
    const float slack = __fmaf_rn(fabsf(highest), 0x1p-20f, __fmul_rn(temperature, 0x1p-100f));
    const float below = __fmul_rn(__fmul_rn(distance, temperature), 1.0f + 0x1p-20f);
    return __fsub_rn(__fsub_rn(highest, below), __fadd_rn(slack, 0x1p-100f));
  }
  __device__ __forceinline__ float floor(unsigned key) const {
    return floor_at(__uint_as_float(min(key, 0x7f800000u)));
  }
  __device__ __forceinline__ u64 mass(unsigned key) const {
    return fixed_mass(__uint_as_float(key), powers);
  }
};

// The smallest integer that is, as a double, at least top_p * total; at least 1, at most the total.
__device__ __forceinline__ u64 mass_limit(float top_p, u64 total) {
  const double limit = __dmul_rn((double)top_p, __ll2double_rn((long long)total));
  long long least = __double2ll_ru(limit);
  while (least > 1 && __ll2double_rn(least - 1) >= limit) --least;
  return min(total, (u64)max(least, 1ll));
}

// What is kept: places up to `end`. If `gathered` is not 0, these are the first so many in shared
// memory.
struct Kept {
  u64 end;
  int gathered;
};

__device__ __forceinline__ Kept keep(const Search<ByScaled>& search, int top_k, float top_p,
                                     float likely) {
  const u64 likely_end = search.end_of(min(search.order.key_at(likely), LAST_MASSIVE));
  const Part& part = *search.shared.part;
  Kept kept = {likely_end, 0};
  u64 count = search.size;
  if (top_k > 0 || top_p >= 1.0f) {
    const u64 most = top_k > 0 ? top_k : EVERYTHING;
    // Mostly the top_k are not far below the highest: the tail is looked at only if they are.
    const u64 near = search.end_of(search.order.key_at(FIRST_SPLITS[SPLITS - 2]));
    u64 end = top_k > 0 ? min(near, likely_end) : likely_end;
    for (;; end = likely_end) {
      search.narrow<false>(0, end, [&](u64) { return most; }, NOTHING_ELSE);
      if (part.whole_count > most || end == likely_end) break;
    }
    count = min((u64)part.whole_count, most);
    if (part.whole_count > most) {
      search.gather();
      const int index = (int)(most - part.count_before) - 1;
      kept.end = search.shared.places[index];
      if (part.first == 0) kept.gathered = index + 1;
    }
  }
  if (top_p >= 1.0f && count <= EXACT_IN_DOUBLE) return kept;
  int gathered = kept.gathered;
  if (gathered > 0) {
    const u64 limit = mass_limit(top_p, search.gathered_mass(gathered));
    kept.gathered = 1 + search.reaching(gathered, 0, limit);
  } else {
    search.narrow<true>(
        0, kept.end, [&](u64 total) { return mass_limit(top_p, total); }, NOTHING_ELSE);
    gathered = search.gather();
    kept.gathered = 1 + search.reaching(gathered, part.mass_before, part.limit);
  }
  kept.end = search.shared.places[kept.gathered - 1];
  if (part.first != 0) kept.gathered = 0;  // what comes before is kept too
  return kept;
}

// The best of the tokens that a thread has seen.
struct Best {
  float score;
  float scaled;
  int id;

  __device__ __forceinline__ void see(float scaled_here, int id_here, unsigned word) {
    const float here = __fadd_rn(scaled_here, noise_in_float(word));
    if (here > score) {
      score = here;
      scaled = scaled_here;
      id = id_here;
    }
  }
};

__device__ __forceinline__ Best draw(const Search<ByScaled>& search, const Kept& kept,
                                     const NoiseKey& noise) {
  Best best = {-infinite(), -infinite(), 0};
  if (kept.gathered > 0) {
    for (int i = threadIdx.x; i < kept.gathered; i += blockDim.x) {
      const u64 place = search.shared.places[i];
      const int id = search.id_of(place);
      best.see(-__uint_as_float(search.key_of(place)), id, token_word(noise, id));
    }
    return best;
  }
  const float kept_floor = search.order.floor(search.key_of(kept.end));
  float floor = kept_floor;
  each_quad_above(search.row, search.size, floor, [&](int id, const float(&logits)[4], int) {
    unsigned words[4];
    philox(words, noise, (unsigned)id / 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float scaled = search.order.scaled(logits[j]);
      const u64 place = (u64)search.order.key_at(scaled) << search.id_bits | (unsigned)(id + j);
      if (place <= kept.end) best.see(scaled, id + j, words[j]);
    }
    // Further down, all luck there is does not lead near the best that the thread has.
    const float reach = __fsub_rn(MOST_NOISE + 2 * NOISE_ERROR, best.score);
    floor = fmaxf(kept_floor, search.order.floor_at(reach));
  });
  return best;
}

// The best of all threads, decided in double among those that float cannot tell apart.
__device__ __forceinline__ int decide(const Best& best, const NoiseKey& noise, u64* partial) {
  const float highest = from_ordered((unsigned)block_max(ordered(best.score), partial));
  u64 exact = 0;
  if (best.score >= highest - NOISE_ERROR) {
    exact = ordered(__dadd_rn(best.scaled, noise_in_double(token_word(noise, best.id))));
  }
  const u64 most = block_max(exact, partial);
  return (int)~(unsigned)block_max(exact == most ? (u64)~(unsigned)best.id : 0, partial);
}

extern "C" __global__ __launch_bounds__(MAX_THREADS, BLOCKS) void sample(
    int* __restrict__ out,  // [num_samples]
#if REPORT_KEPT
    u64* __restrict__ kept_end,  // [num_samples]
#endif
    const float* __restrict__ logits,         // [num_logits, vocab_size]
    const int* __restrict__ logits_row,       // [num_samples]
    const float* __restrict__ temperature,    // [num_samples]
    const float* __restrict__ top_p,          // [num_samples]
    const float* __restrict__ likely,         // [num_samples]
    const int* __restrict__ top_k,            // [num_samples]
    const u64* __restrict__ seed,             // [num_samples]
    const int* __restrict__ sample_index,     // [num_samples]
    const int* __restrict__ output_position,  // [num_samples]
    const int* __restrict__ forced,           // [num_samples]
    int vocab_size) {
  __shared__ u64 powers[POWERS];
  __shared__ u64 places[CAPACITY];
  __shared__ u64 parts[2 * SPLITS * MAX_WARPS];
  __shared__ u64 totals[2 * SPLITS];
  __shared__ u64 splits[SPLITS];
  __shared__ u64 partial[MAX_WARPS];
  __shared__ u64 found[1];
  __shared__ int gathered[1];
  __shared__ Part part[1];
  const int s = blockIdx.x;
  const float* row = logits + (long long)logits_row[s] * vocab_size;
  make_powers(powers);
  const Highest highest = highest_logit(row, vocab_size, partial);
  int token = highest.id;
  Kept kept = {EVERYTHING, 0};
  if (!isfinite(highest.logit)) {
    token = -1;
  } else if (temperature[s] > 0.0f) {
    const Scratch scratch = {places, parts, totals, splits, partial, found, gathered, part};
    const ByScaled order = {highest.logit, temperature[s], powers};
    const Search<ByScaled> search(row, vocab_size, order, scratch);
    const int most = top_k[s] < vocab_size ? top_k[s] : 0;
    if (most > 0 || top_p[s] < 1.0f || likely[s] < infinite()) {
      kept = keep(search, most, top_p[s], likely[s]);
    }
    const NoiseKey noise = {seed[s], (unsigned)output_position[s], (unsigned)sample_index[s]};
    token = decide(draw(search, kept, noise), noise, partial);
  }
  if (threadIdx.x == 0) {
    out[s] = token >= 0 && forced[s] >= 0 ? forced[s] : token;
#if REPORT_KEPT
    kept_end[s] = kept.end;
#endif
  }
}

/* check
# greedy with a tie; top_k 1; a nucleus of two, of which the noise takes either; NaN; a forced token
vocab = 203
logits = normal(4, vocab, dtype=f32)
logits[0, [7, 100, 200]] = 9
logits[2, [5, 150]] = 20
logits[3, 77] = np.nan
row = array([0, 1, *[2] * 64, 3, 0])
n = row.size
def column(value, dtype):
    return array(np.full(n, value), dtype=dtype)
temperature, top_p, likely = column(0, f32), column(1, f32), column(np.inf, f32)
top_k, forced = column(0, np.int32), column(-1, np.int32)
index = array(np.arange(n), dtype=np.int32)
seed, position = column(2**63 + 5, np.uint64), column(3, np.int32)
temperature[1:-1], top_k[1], top_p[2:-2], forced[-2:] = 0.7, 1, 0.99, 42
out = empty(n, dtype=np.int32)
sample((n,), (64,), (out, logits, row, temperature, top_p, likely, top_k, seed, index, position,
                     forced, np.int32(vocab)))
expect(out[:2], [7, logits[1].argmax()])
expect(np.unique(out[2:-2]), [5, 150])
expect(out[-2:], [-1, 42])
*/
