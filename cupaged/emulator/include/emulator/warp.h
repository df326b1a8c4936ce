// Warp functions: shuffles, votes, matches and reductions among the lanes of a mask.
//
// All lanes of the mask come to the same call; the last to arrive computes the results of all. They
// order no memory accesses: that is __syncwarp's work.
#pragma once

#include "emulator/atomics.h"
#include "emulator/core.h"

namespace emulator {

// --- shuffles ---

template <class T>
struct ShuffleInput {
  T value;
  unsigned source;  // the lane whose value is wanted
};

template <class T>
struct ShuffleOutput {
  T value;
  bool came;  // whether that lane took part
};

template <class T>
EMULATOR_UNCHECKED void hand_over(const ShuffleInput<T>* const* in, ShuffleOutput<T>* const* out,
                                  unsigned arrived) {
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((arrived >> lane & 1) == 0) continue;
    const ShuffleInput<T>* source = in[in[lane]->source];
    out[lane]->came = source != nullptr;
    if (source != nullptr) out[lane]->value = source->value;
  }
}

template <class T>
T shuffle(const char* name, unsigned mask, T value, unsigned source, Place place) {
  const auto result = warp_collective<ShuffleOutput<T>>(
      name, mask, ShuffleInput<T>{value, source}, &hand_over<T>, place);
  if (!result.came) {
    fail(Kind::warp_mask, place, "%s reads lane %u, which has exited or is not in the mask 0x%08x",
         name, source, mask);
  }
  return result.value;
}

// Segments of `width` lanes shuffle among themselves.
inline void check_width(const char* name, int width, Place place) {
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) {
    fail(Kind::warp_mask, place, "%s has width %d; allowed are 1, 2, 4, 8, 16 and 32", name, width);
  }
}

// The lane that each form reads. Distances and lanes count modulo 32, as in the machine's
// instruction; where that lane lies outside the segment (for xor: above it), a lane reads itself.
inline unsigned indexed_source(unsigned lane, int index, int width) {
  const unsigned first = lane & ~(unsigned(width) - 1);
  return first | (unsigned(index) & (unsigned(width) - 1));
}
inline unsigned source_above(unsigned lane, unsigned distance, int width) {
  const unsigned last = lane | (unsigned(width) - 1);
  const unsigned source = lane + (distance & 31);
  return source <= last ? source : lane;
}
inline unsigned source_below(unsigned lane, unsigned distance, int width) {
  const int first = int(lane & ~(unsigned(width) - 1));
  const int source = int(lane) - int(distance & 31);
  return source >= first ? unsigned(source) : lane;
}
inline unsigned mirrored_source(unsigned lane, int mask, int width) {
  const unsigned last = lane | (unsigned(width) - 1);
  const unsigned source = lane ^ (unsigned(mask) & 31);
  return source <= last ? source : lane;
}

}  // namespace emulator

#define EMULATOR_SHUFFLE(NAME, T, SELECTOR, SOURCE)                                             \
  inline T NAME(unsigned int mask, T value, SELECTOR selector, int width = 32,                  \
                emulator::Place place = EMULATOR_HERE) {                                        \
    emulator::check_width(#NAME, width, place);                                                 \
    const unsigned source = emulator::SOURCE(emulator::lane_id(), selector, width);             \
    return emulator::shuffle<T>(#NAME, mask, value, source, place);                             \
  }
#define EMULATOR_SHUFFLES(T)                                                                    \
  EMULATOR_SHUFFLE(__shfl_sync, T, int, indexed_source)                                         \
  EMULATOR_SHUFFLE(__shfl_up_sync, T, unsigned int, source_below)                               \
  EMULATOR_SHUFFLE(__shfl_down_sync, T, unsigned int, source_above)                             \
  EMULATOR_SHUFFLE(__shfl_xor_sync, T, int, mirrored_source)
EMULATOR_SHUFFLES(int)
EMULATOR_SHUFFLES(unsigned int)
EMULATOR_SHUFFLES(long)
EMULATOR_SHUFFLES(unsigned long)
EMULATOR_SHUFFLES(long long)
EMULATOR_SHUFFLES(unsigned long long)
EMULATOR_SHUFFLES(float)
EMULATOR_SHUFFLES(double)
// cuda_fp16.h and cuda_bf16.h use EMULATOR_SHUFFLES for their types.

// --- votes ---

namespace emulator {

EMULATOR_UNCHECKED inline void cast_votes(const int* const* in, unsigned* const* out,
                                          unsigned arrived) {
  unsigned votes = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((arrived >> lane & 1) != 0 && *in[lane] != 0) votes |= 1u << lane;
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((arrived >> lane & 1) != 0) *out[lane] = votes;
  }
}

struct AllVotes {
  EMULATOR_UNCHECKED void operator()(const int* const* in, unsigned* const* out,
                                     unsigned arrived) const {
    cast_votes(in, out, arrived);
    for (unsigned lane = 0; lane < 32; ++lane) {
      if ((arrived >> lane & 1) != 0) *out[lane] = *out[lane] == arrived;
    }
  }
};

}  // namespace emulator

inline unsigned int __ballot_sync(unsigned int mask, int predicate,
                                  emulator::Place place = EMULATOR_HERE) {
  return emulator::warp_collective<unsigned>("__ballot_sync", mask, predicate,
                                             &emulator::cast_votes, place);
}
inline int __any_sync(unsigned int mask, int predicate, emulator::Place place = EMULATOR_HERE) {
  return emulator::warp_collective<unsigned>("__any_sync", mask, predicate, &emulator::cast_votes,
                                             place) != 0;
}
inline int __all_sync(unsigned int mask, int predicate, emulator::Place place = EMULATOR_HERE) {
  return static_cast<int>(emulator::warp_collective<unsigned>("__all_sync", mask, predicate,
                                                              emulator::AllVotes{}, place));
}
// The lanes that come to the same call. A device may name fewer: masks should come from
// __ballot_sync, taken before the branch.
inline unsigned int __activemask(emulator::Place place = EMULATOR_HERE) {
  return emulator::active_lanes(place);
}

// --- matches ---

namespace emulator {

template <class T>
EMULATOR_UNCHECKED void match_any(const T* const* in, unsigned* const* out, unsigned arrived) {
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((arrived >> lane & 1) == 0) continue;
    unsigned same = 0;
    for (unsigned other = 0; other < 32; ++other) {
      if ((arrived >> other & 1) != 0 && __builtin_memcmp(in[lane], in[other], sizeof(T)) == 0) {
        same |= 1u << other;
      }
    }
    *out[lane] = same;
  }
}

// The lanes that took part if all have the same value, else none.
template <class T>
EMULATOR_UNCHECKED void match_all(const T* const* in, unsigned* const* out, unsigned arrived) {
  match_any(in, out, arrived);
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((arrived >> lane & 1) != 0 && *out[lane] != arrived) *out[lane] = 0;
  }
}

}  // namespace emulator

#define EMULATOR_MATCH(T)                                                                       \
  inline unsigned int __match_any_sync(unsigned int mask, T value,                              \
                                       emulator::Place place = EMULATOR_HERE) {                 \
    return emulator::warp_collective<unsigned>("__match_any_sync", mask, value,                 \
                                               &emulator::match_any<T>, place);                 \
  }                                                                                             \
  inline unsigned int __match_all_sync(unsigned int mask, T value, int* all,                    \
                                       emulator::Place place = EMULATOR_HERE) {                 \
    const unsigned same = emulator::warp_collective<unsigned>("__match_all_sync", mask, value,  \
                                                              &emulator::match_all<T>, place);  \
    *all = same != 0;                                                                           \
    return same;                                                                                \
  }
EMULATOR_MATCH(int)
EMULATOR_MATCH(unsigned int)
EMULATOR_MATCH(long)
EMULATOR_MATCH(unsigned long)
EMULATOR_MATCH(long long)
EMULATOR_MATCH(unsigned long long)
EMULATOR_MATCH(float)
EMULATOR_MATCH(double)
#undef EMULATOR_MATCH

// --- reductions of integers ---

namespace emulator {

template <class T, class Combine>
struct Reduction {
  EMULATOR_UNCHECKED void operator()(const T* const* in, T* const* out, unsigned arrived) const {
    T sum = *in[__builtin_ctz(arrived)];
    for (unsigned rest = arrived & (arrived - 1); rest != 0; rest &= rest - 1) {
      sum = Combine{}(sum, *in[__builtin_ctz(rest)]);
    }
    for (unsigned rest = arrived; rest != 0; rest &= rest - 1) *out[__builtin_ctz(rest)] = sum;
  }
};

}  // namespace emulator

#define EMULATOR_REDUCE(NAME, T, COMBINE)                                                       \
  inline T NAME(unsigned int mask, T value, emulator::Place place = EMULATOR_HERE) {            \
    return emulator::warp_collective<T>(                                                        \
        #NAME, mask, value, emulator::Reduction<T, emulator::COMBINE>{}, place);                \
  }
EMULATOR_REDUCE(__reduce_add_sync, unsigned int, Add)
EMULATOR_REDUCE(__reduce_min_sync, unsigned int, Smaller)
EMULATOR_REDUCE(__reduce_max_sync, unsigned int, Larger)
EMULATOR_REDUCE(__reduce_min_sync, int, Smaller)
EMULATOR_REDUCE(__reduce_max_sync, int, Larger)
EMULATOR_REDUCE(__reduce_and_sync, unsigned int, And)
EMULATOR_REDUCE(__reduce_or_sync, unsigned int, Or)
EMULATOR_REDUCE(__reduce_xor_sync, unsigned int, Xor)
#undef EMULATOR_REDUCE
// Through unsigned: the sum wraps around.
inline int __reduce_add_sync(unsigned int mask, int value, emulator::Place place = EMULATOR_HERE) {
  return static_cast<int>(__reduce_add_sync(mask, static_cast<unsigned>(value), place));
}

// --- the forms without a mask, which newer devices do not have ---

#define EMULATOR_REMOVED(OLD, NEW)                                                              \
  template <class... Args>                                                                      \
  int OLD(Args...) {                                                                            \
    static_assert(sizeof...(Args) > 99, #OLD " is gone since compute capability 7.0: use " NEW); \
    return 0;                                                                                   \
  }
EMULATOR_REMOVED(__shfl, "__shfl_sync(mask, value, lane)")
EMULATOR_REMOVED(__shfl_up, "__shfl_up_sync(mask, value, distance)")
EMULATOR_REMOVED(__shfl_down, "__shfl_down_sync(mask, value, distance)")
EMULATOR_REMOVED(__shfl_xor, "__shfl_xor_sync(mask, value, lane_mask)")
EMULATOR_REMOVED(__any, "__any_sync(mask, predicate)")
EMULATOR_REMOVED(__all, "__all_sync(mask, predicate)")
EMULATOR_REMOVED(__ballot, "__ballot_sync(mask, predicate)")
#undef EMULATOR_REMOVED
