// Which tokens of a row come first: the likeliest `count`, or the likeliest whose mass reaches a
// limit, exactly, without sorting the row.
//
// A token's place is one integer, its key above its id: the key falls as the logit rises, so that
// places ascend from the likeliest token to the least likely, equal ones by id. No two are equal.
// A search counts the tokens (or sums their mass) up to each of 4 splits, in one walk of the row,
// goes on in the part where the limit is reached, and when a part has no more than CAPACITY tokens,
// gathers and sorts them in shared memory. Sums are of integers: no order changes them.
//
// An Order says how: key(logit), 32 bits; key_at(distance), the key of a logit that far below the
// highest; floor(key), a logit below which all keys are larger; mass(key), 64-bit fixed point. The
// floor lets a walk pass over most quads of a row with one comparison.
#pragma once

#include "sampling_row.cuh"

constexpr int CAPACITY = 4096;  // tokens sorted at a time, a power of two
constexpr int RUN = 4;          // neighbours looked at for an example, as many as fit by a thread
constexpr int SPLITS = 4;
constexpr float FIRST_SPLITS[SPLITS - 1] = {3.0f, 6.0f, 10.0f};  // distances from the highest

struct NothingElse {
  __device__ __forceinline__ void operator()(const float (&)[4], int) const {}
};
constexpr NothingElse NOTHING_ELSE;

// The places first .. last, of `count` tokens, in which a limit is reached, and what comes before
// them of all that was searched, which began at whole_first and has whole_count tokens.
struct Part {
  u64 first;
  u64 last;
  u64 mass_before;
  u64 limit;
  u64 whole_first;
  unsigned whole_count;
  unsigned count_before;
  unsigned count;
};

// Shared memory of a search.
struct Scratch {
  u64* places;    // [CAPACITY]
  u64* parts;     // [2 * SPLITS * MAX_WARPS]
  u64* totals;    // [2 * SPLITS]: counts, then masses
  u64* splits;    // [SPLITS]
  u64* partial;   // [MAX_WARPS]
  u64* found;     // [1]
  int* gathered;  // [1]
  Part* part;     // [1]
};

template <class Order>
struct Search {
  const float* row;
  int size;
  Order order;
  Scratch shared;
  int id_bits;

  __device__ Search(const float* row, int size, Order order, Scratch shared)
      : row(row), size(size), order(order), shared(shared), id_bits(32 - __clz(size - 1)) {}

  __device__ __forceinline__ u64 place(float logit, int id) const {
    return (u64)order.key(logit) << id_bits | (unsigned)id;
  }
  // The last place of a key.
  __device__ __forceinline__ u64 end_of(unsigned key) const {
    return ((u64)key << id_bits) + ((1ull << id_bits) - 1);
  }
  __device__ __forceinline__ unsigned key_of(u64 place) const {
    return (unsigned)(place >> id_bits);
  }
  __device__ __forceinline__ int id_of(u64 place) const {
    return (int)(place & ((1ull << id_bits) - 1));
  }

  // Visits the quads that are not below the floor.
  template <class Visit>
  __device__ __forceinline__ void walk(NothingElse, float floor, Visit visit) const {
    each_quad_above(row, size, floor, visit);
  }
  // All quads; also(logits, count) is called for each of them.
  template <class Also, class Visit>
  __device__ __forceinline__ void walk(Also also, float floor, Visit visit) const {
    each_quad<2>(row, size, [&](int id, const float(&logits)[4], int count) {
      also(logits, count);
      if (!(largest(logits) < floor)) visit(id, logits, count);
    });
  }

  // Totals of the part's tokens up to each split; also(logits, count) is called for each quad of
  // the row. Begins and ends with a barrier.
  template <bool BY_MASS, class Also>
  __device__ __forceinline__ void measure(Also also) const {
    __syncthreads();
    const u64 first = shared.part->first;
    unsigned counts[SPLITS] = {};
    u64 masses[SPLITS] = {};
    const u64 last = shared.splits[SPLITS - 1];
    const float floor = order.floor(key_of(last));
    walk(also, floor, [&](int id, const float(&logits)[4], int count) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j >= count) continue;
        const u64 here = place(logits[j], id + j);
        if (here < first || here > last) continue;
        u64 mass = 0;
        if constexpr (BY_MASS) mass = order.mass(key_of(here));
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) {
          if (s == SPLITS - 1 || here <= shared.splits[s]) {
            ++counts[s];
            if constexpr (BY_MASS) masses[s] += mass;
          }
        }
      }
    });
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int num_warps = blockDim.x / 32;
#pragma unroll
    for (int s = 0; s < SPLITS; ++s) {
      const u64 count = warp_sum((u64)counts[s]);
      if (lane == 0) shared.parts[s * MAX_WARPS + warp] = count;
      if constexpr (BY_MASS) {
        const u64 mass = warp_sum(masses[s]);
        if (lane == 0) shared.parts[(SPLITS + s) * MAX_WARPS + warp] = mass;
      }
    }
    __syncthreads();
    for (int s = warp; s < (BY_MASS ? 2 : 1) * SPLITS; s += num_warps) {
      const u64 total = warp_sum(lane < num_warps ? shared.parts[s * MAX_WARPS + lane] : 0);
      if (lane == 0) shared.totals[s] = total;
    }
    __syncthreads();
  }

  // Makes `shared.part` the one, among the places from `first` to `last`, in which the limit is
  // reached: of counts if not BY_MASS, of masses otherwise. limit_of(total) says what it is once
  // the total is known. If the whole count is no more than the limit, the part is anything. `also`
  // as for `measure`, once. Ends with a barrier.
  template <bool BY_MASS, class LimitOf, class Also>
  __device__ __forceinline__ void narrow(u64 first, u64 last, LimitOf limit_of, Also also) const {
    __syncthreads();  // everybody has read the last part
    if (threadIdx.x < SPLITS) shared.splits[threadIdx.x] = min(last, first_split(threadIdx.x));
    if (threadIdx.x == 0) *shared.part = {first, last, 0, 0, first, 0, 0, 0};
    measure<BY_MASS>(also);
    if (threadIdx.x == 0) {
      shared.part->whole_count = (unsigned)shared.totals[SPLITS - 1];
      shared.part->limit = limit_of(shared.totals[(BY_MASS ? 2 : 1) * SPLITS - 1]);
      if (BY_MASS || shared.part->whole_count > shared.part->limit) choose<BY_MASS>();
    }
    __syncthreads();
#pragma unroll 1
    for (bool by_examples = true; shared.part->count > CAPACITY; by_examples = !by_examples) {
      split_part(by_examples ? take_examples() : 0);
      measure<BY_MASS>(NOTHING_ELSE);
      if (threadIdx.x == 0) choose<BY_MASS>();
      __syncthreads();
    }
  }

  __device__ __forceinline__ u64 first_split(int s) const {
    if (s == SPLITS - 1) return ~0ull;
    float distance = FIRST_SPLITS[0];
#pragma unroll
    for (int i = 1; i < SPLITS - 1; ++i) distance = s == i ? FIRST_SPLITS[i] : distance;
    return end_of(order.key_at(distance));
  }

  // Goes on in what lies between two splits. For one thread.
  template <bool BY_MASS>
  __device__ __forceinline__ void choose() const {
    Part part = *shared.part;
    const u64 before = BY_MASS ? part.mass_before : part.count_before;
    int s = 0;
    while (before + shared.totals[(BY_MASS ? SPLITS : 0) + s] < part.limit) ++s;
    part.last = shared.splits[s];
    part.count = (unsigned)shared.totals[s];
    if (s > 0) {
      part.first = max(part.first, shared.splits[s - 1] + 1);
      part.count -= (unsigned)shared.totals[s - 1];
      part.count_before += (unsigned)shared.totals[s - 1];
      if constexpr (BY_MASS) part.mass_before += shared.totals[SPLITS + s - 1];
    }
    *shared.part = part;
  }

  // Splits for the next round: at quantiles of the gathered examples, or, if there are too few, at
  // even distances, which always come to an end.
  __device__ __forceinline__ void split_part(int examples) const {
    if (threadIdx.x < SPLITS) {
      const u64 first = shared.part->first;
      const u64 last = shared.part->last;
      const int next = threadIdx.x + 1;
      u64 split = last;
      if (next < SPLITS && examples >= SPLITS) {
        split = shared.places[examples * next / SPLITS];
      } else if (next < SPLITS) {
        split = first + next * ((last - first) / SPLITS);
      }
      shared.splits[threadIdx.x] = split;
    }
  }

  // The part's tokens in ascending order in `shared.places`; their number. Where there is room, all
  // that were searched come along, and the part becomes that: nothing before it then.
  __device__ __forceinline__ int gather() const {
    __syncthreads();  // everybody knows the part
    if (threadIdx.x == 0 && shared.part->count_before + shared.part->count <= CAPACITY) {
      shared.part->first = shared.part->whole_first;
      shared.part->count += shared.part->count_before;
      shared.part->count_before = 0;
      shared.part->mass_before = 0;
    }
    begin_gathering();
    const u64 first = shared.part->first;
    const u64 last = shared.part->last;
    const float floor = order.floor(key_of(last));
    each_quad_above(row, size, floor, [&](int id, const float(&logits)[4], int count) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j < count) gather_token(first, last, logits[j], id + j);
      }
    });
    return sort_gathered();
  }

  // Some of the part's tokens, of places all over the row, gathered; their number. They show where
  // to split a part whose keys lie together.
  __device__ __forceinline__ int take_examples() const {
    begin_gathering();
    const u64 first = shared.part->first;
    const u64 last = shared.part->last;
    const int runs = min((int)blockDim.x, CAPACITY / RUN);
    if (threadIdx.x < runs) {
      const int start = (int)((long long)size * threadIdx.x / runs);
      for (int id = start; id < min(size, start + RUN); ++id) {
        gather_token(first, last, row[id], id);
      }
    }
    return sort_gathered();
  }

  __device__ __forceinline__ void begin_gathering() const {
    __syncthreads();
    if (threadIdx.x == 0) *shared.gathered = 0;
    __syncthreads();
  }

  // The order in which they come does not matter: they are sorted.
  __device__ __forceinline__ void gather_token(u64 first, u64 last, float logit, int id) const {
    const u64 here = place(logit, id);
    if (first <= here && here <= last) {
      shared.places[atomicAdd(shared.gathered, 1)] = here;
    }
  }

  __device__ __forceinline__ int sort_gathered() const {
    __syncthreads();
    const int count = *shared.gathered;
    sort(count);
    return count;
  }

  // Ascending, by Batcher's bitonic network. Ends and begins with a barrier.
  __device__ __forceinline__ void sort(int count) const {
    int padded = 1;
    while (padded < count) padded *= 2;
    for (int i = count + threadIdx.x; i < padded; i += blockDim.x) shared.places[i] = ~0ull;
    __syncthreads();
#pragma unroll 1
    for (int width = 2; width <= padded; width *= 2) {
#pragma unroll 1
      for (int distance = width / 2; distance > 0; distance /= 2) {
        for (int pair = threadIdx.x; pair < padded / 2; pair += blockDim.x) {
          const int low = 2 * pair - (pair & (distance - 1));
          const u64 a = shared.places[low];
          const u64 b = shared.places[low + distance];
          if ((a > b) == ((low & width) == 0)) {
            shared.places[low] = b;
            shared.places[low + distance] = a;
          }
        }
        __syncthreads();
      }
    }
  }

  __device__ __forceinline__ u64 mass_at(int i) const {
    return order.mass(key_of(shared.places[i]));
  }

  // Mass of the first `count` gathered tokens.
  __device__ __forceinline__ u64 gathered_mass(int count) const {
    u64 mass = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) mass += mass_at(i);
    return block_sum(mass, shared.partial);
  }

  // The index of the first gathered token up to which the mass reaches the limit, of `count`.
  __device__ __forceinline__ int reaching(int count, u64 mass_before, u64 limit) const {
    const int share = (count + blockDim.x - 1) / blockDim.x;
    const int start = min(count, (int)threadIdx.x * share);
    const int end = min(count, start + share);
    u64 mass = 0;
    for (int i = start; i < end; ++i) mass += mass_at(i);
    u64 before = mass_before + block_sum_before(mass, shared.partial);
    if (before < limit && before + mass >= limit) {
      int i = start;
      for (before += mass_at(i); before < limit; before += mass_at(++i)) {
      }
      *shared.found = i;
    }
    __syncthreads();
    return (int)*shared.found;
  }
};
