// cooperative_groups::reduce over a tile or a coalesced group, with plus, less, greater and bit_*.
//
// Values are combined in the order of ranks, ((v0 + v1) + v2) + ...; the device may choose another
// order, so sums of floats can differ in the last bits.
#pragma once

#include "cooperative_groups.h"

namespace cooperative_groups {

#define EMULATOR_OPERATION(NAME, EXPRESSION)                            \
  template <class T = void>                                             \
  struct NAME {                                                         \
    T operator()(const T& a, const T& b) const { return EXPRESSION; }   \
  };                                                                    \
  template <>                                                           \
  struct NAME<void> {                                                   \
    template <class T>                                                  \
    T operator()(const T& a, const T& b) const {                        \
      return EXPRESSION;                                                \
    }                                                                   \
  };
EMULATOR_OPERATION(plus, a + b)
EMULATOR_OPERATION(less, b < a ? b : a)
EMULATOR_OPERATION(greater, a < b ? b : a)
EMULATOR_OPERATION(bit_and, a & b)
EMULATOR_OPERATION(bit_or, a | b)
EMULATOR_OPERATION(bit_xor, a ^ b)
#undef EMULATOR_OPERATION

namespace details {

// Gives every lane the combination of all values that came.
template <class T, class Op>
struct ReduceLanes {
  Op op;
  EMULATOR_UNCHECKED void operator()(const T* const* in, T* const* out, unsigned arrived) {
    T sum = *in[__builtin_ctz(arrived)];
    for (unsigned rest = arrived & (arrived - 1); rest != 0; rest &= rest - 1) {
      sum = op(sum, *in[__builtin_ctz(rest)]);
    }
    for (unsigned rest = arrived; rest != 0; rest &= rest - 1) *out[__builtin_ctz(rest)] = sum;
  }
};

}  // namespace details

template <class Group, class T, class Op>
T reduce(const Group& group, T value, Op op, emulator::Place place = EMULATOR_HERE) {
  return emulator::warp_collective<T>("cooperative_groups::reduce", group.lane_mask(), value,
                                      details::ReduceLanes<T, Op>{op}, place);
}

}  // namespace cooperative_groups
