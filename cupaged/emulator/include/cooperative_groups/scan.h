// cooperative_groups::inclusive_scan and exclusive_scan over a tile or a coalesced group, in the
// order of ranks. The exclusive scan of rank 0 is T().
#pragma once

#include "cooperative_groups/reduce.h"

namespace cooperative_groups {

namespace details {

// Gives every lane the combination of the values up to its own, or of those before it.
template <class T, class Op>
struct ScanLanes {
  Op op;
  bool with_own;
  EMULATOR_UNCHECKED void operator()(const T* const* in, T* const* out, unsigned arrived) {
    T before = T();
    bool first = true;
    for (unsigned rest = arrived; rest != 0; rest &= rest - 1) {
      const int lane = __builtin_ctz(rest);
      const T through = first ? *in[lane] : op(before, *in[lane]);
      *out[lane] = with_own ? through : before;
      before = through;
      first = false;
    }
  }
};

}  // namespace details

template <class Group, class T, class Op>
T inclusive_scan(const Group& group, T value, Op op, emulator::Place place = EMULATOR_HERE) {
  return emulator::warp_collective<T>("cooperative_groups::inclusive_scan", group.lane_mask(),
                                      value, details::ScanLanes<T, Op>{op, true}, place);
}
template <class Group, class T>
T inclusive_scan(const Group& group, T value, emulator::Place place = EMULATOR_HERE) {
  return inclusive_scan(group, value, plus<T>(), place);
}

template <class Group, class T, class Op>
T exclusive_scan(const Group& group, T value, Op op, emulator::Place place = EMULATOR_HERE) {
  return emulator::warp_collective<T>("cooperative_groups::exclusive_scan", group.lane_mask(),
                                      value, details::ScanLanes<T, Op>{op, false}, place);
}
template <class Group, class T>
T exclusive_scan(const Group& group, T value, emulator::Place place = EMULATOR_HERE) {
  return exclusive_scan(group, value, plus<T>(), place);
}

}  // namespace cooperative_groups
