// SIMD within a word: __vadd4, __vmaxs2, __vcmpeq4 and their family, on four bytes or two halves.
//
// Lanes never carry into each other. Comparisons give all ones (__vcmp*) or one (__vset*) per lane.
#pragma once

#include "emulator/integer_intrinsics.h"

namespace emulator {

// Applies op to each lane of a and b, as elements of type T, and keeps a lane's low bits.
template <class T, class Op>
__forceinline__ unsigned int each_lane(unsigned int a, unsigned int b, Op op) {
  constexpr int BITS = 8 * static_cast<int>(sizeof(T));
  constexpr unsigned int LANE = (1u << BITS) - 1;
  unsigned int result = 0;
  for (int lane = 0; lane < 32 / BITS; ++lane) {
    const int value = op(int(element_of<T>(a, lane)), int(element_of<T>(b, lane)));
    result |= (static_cast<unsigned int>(value) & LANE) << (lane * BITS);
  }
  return result;
}

// Clamps to what T holds.
template <class T>
__forceinline__ int saturate_to(int value) {
  constexpr int BITS = 8 * static_cast<int>(sizeof(T));
  constexpr int LOWEST = T(-1) < T(0) ? -(1 << (BITS - 1)) : 0;
  constexpr int HIGHEST = T(-1) < T(0) ? (1 << (BITS - 1)) - 1 : (1 << BITS) - 1;
  return value < LOWEST ? LOWEST : value > HIGHEST ? HIGHEST : value;
}

template <class T>
__forceinline__ unsigned int sum_lanes(unsigned int word) {
  unsigned int sum = 0;
  for (int lane = 0; lane < 4 / static_cast<int>(sizeof(T)); ++lane) {
    sum += element_of<T>(word, lane);
  }
  return sum;
}

}  // namespace emulator

#define EMULATOR_LANEWISE(NAME, T, EXPRESSION)                                                  \
  inline unsigned int NAME(unsigned int first, unsigned int second) {                           \
    return emulator::each_lane<T>(first, second, [](int a, int b) -> int { return EXPRESSION; }); \
  }
#define EMULATOR_LANEWISE_ONE(NAME, T, EXPRESSION)                                              \
  inline unsigned int NAME(unsigned int word) {                                                 \
    return emulator::each_lane<T>(word, 0u, [](int a, int) -> int { return EXPRESSION; });      \
  }
#define EMULATOR_COMPARE(OP, N, T, CONDITION)                                                   \
  EMULATOR_LANEWISE(__vcmp##OP##N, T, (CONDITION) ? -1 : 0)                                     \
  EMULATOR_LANEWISE(__vset##OP##N, T, (CONDITION) ? 1 : 0)
#define EMULATOR_SIMD(N, S, U)                                                                  \
  EMULATOR_LANEWISE(__vadd##N, U, a + b)                                                        \
  EMULATOR_LANEWISE(__vsub##N, U, a - b)                                                        \
  EMULATOR_LANEWISE(__vaddss##N, S, emulator::saturate_to<S>(a + b))                            \
  EMULATOR_LANEWISE(__vaddus##N, U, emulator::saturate_to<U>(a + b))                            \
  EMULATOR_LANEWISE(__vsubss##N, S, emulator::saturate_to<S>(a - b))                            \
  EMULATOR_LANEWISE(__vsubus##N, U, emulator::saturate_to<U>(a - b))                            \
  EMULATOR_LANEWISE(__vavgs##N, S, (a + b + (a + b >= 0)) >> 1)                                 \
  EMULATOR_LANEWISE(__vavgu##N, U, (a + b + 1) >> 1)                                            \
  EMULATOR_LANEWISE(__vhaddu##N, U, (a + b) >> 1)                                               \
  EMULATOR_LANEWISE(__vmaxs##N, S, a > b ? a : b)                                               \
  EMULATOR_LANEWISE(__vmaxu##N, U, a > b ? a : b)                                               \
  EMULATOR_LANEWISE(__vmins##N, S, a < b ? a : b)                                               \
  EMULATOR_LANEWISE(__vminu##N, U, a < b ? a : b)                                               \
  EMULATOR_LANEWISE(__vabsdiffs##N, S, a > b ? a - b : b - a)                                   \
  EMULATOR_LANEWISE(__vabsdiffu##N, U, a > b ? a - b : b - a)                                   \
  EMULATOR_LANEWISE_ONE(__vabs##N, S, a < 0 ? -a : a)                                           \
  EMULATOR_LANEWISE_ONE(__vabsss##N, S, emulator::saturate_to<S>(a < 0 ? -a : a))               \
  EMULATOR_LANEWISE_ONE(__vneg##N, S, -a)                                                       \
  EMULATOR_LANEWISE_ONE(__vnegss##N, S, emulator::saturate_to<S>(-a))                           \
  EMULATOR_COMPARE(eq, N, U, a == b)                                                            \
  EMULATOR_COMPARE(ne, N, U, a != b)                                                            \
  EMULATOR_COMPARE(lts, N, S, a < b)                                                            \
  EMULATOR_COMPARE(les, N, S, a <= b)                                                           \
  EMULATOR_COMPARE(gts, N, S, a > b)                                                            \
  EMULATOR_COMPARE(ges, N, S, a >= b)                                                           \
  EMULATOR_COMPARE(ltu, N, U, a < b)                                                            \
  EMULATOR_COMPARE(leu, N, U, a <= b)                                                           \
  EMULATOR_COMPARE(gtu, N, U, a > b)                                                            \
  EMULATOR_COMPARE(geu, N, U, a >= b)                                                           \
  inline unsigned int __vsads##N(unsigned int a, unsigned int b) {                              \
    return emulator::sum_lanes<U>(__vabsdiffs##N(a, b));                                        \
  }                                                                                             \
  inline unsigned int __vsadu##N(unsigned int a, unsigned int b) {                              \
    return emulator::sum_lanes<U>(__vabsdiffu##N(a, b));                                        \
  }

EMULATOR_SIMD(4, signed char, unsigned char)
EMULATOR_SIMD(2, short, unsigned short)

#undef EMULATOR_SIMD
#undef EMULATOR_COMPARE
#undef EMULATOR_LANEWISE_ONE
#undef EMULATOR_LANEWISE
