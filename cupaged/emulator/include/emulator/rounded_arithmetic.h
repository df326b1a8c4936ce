// Arithmetic with the rounding in the name: __fadd_rn ... __fmaf_rd, __dadd_rn ... __dsqrt_ru.
//
// _rn is the host's own arithmetic: round to nearest, ties to even, one rounding, never contracted
// (the emulator compiles with -ffp-contract=off). The other modes set the host's rounding mode.
#pragma once

#include <cfenv>
#include <cmath>

namespace emulator {

// Runs one operation in a rounding mode. The volatile operands keep it between the two calls.
#define EMULATOR_IN_MODE(NAME, EXPRESSION)                                                      \
  template <class T>                                                                            \
  EMULATOR_UNCHECKED T NAME(int mode, T first, T second, T third) {                             \
    volatile T a = first, b = second, c = third;                                                \
    std::fesetround(mode);                                                                      \
    volatile T result = EXPRESSION;                                                             \
    std::fesetround(FE_TONEAREST);                                                              \
    (void)a, (void)b, (void)c;                                                                  \
    return result;                                                                              \
  }
EMULATOR_IN_MODE(add_in_mode, a + b)
EMULATOR_IN_MODE(subtract_in_mode, a - b)
EMULATOR_IN_MODE(multiply_in_mode, a * b)
EMULATOR_IN_MODE(divide_in_mode, a / b)
EMULATOR_IN_MODE(root_in_mode, std::sqrt(T(a)))
EMULATOR_IN_MODE(multiply_add_in_mode, std::fma(T(a), T(b), T(c)))
#undef EMULATOR_IN_MODE

}  // namespace emulator

#define EMULATOR_ROUNDED(T, P, FMA, SUFFIX, MODE)                                               \
  inline T __##P##add_##SUFFIX(T a, T b) { return emulator::add_in_mode<T>(MODE, a, b, 0); }    \
  inline T __##P##sub_##SUFFIX(T a, T b) { return emulator::subtract_in_mode<T>(MODE, a, b, 0); } \
  inline T __##P##mul_##SUFFIX(T a, T b) { return emulator::multiply_in_mode<T>(MODE, a, b, 0); } \
  inline T __##P##div_##SUFFIX(T a, T b) { return emulator::divide_in_mode<T>(MODE, a, b, 0); } \
  inline T __##P##rcp_##SUFFIX(T a) { return emulator::divide_in_mode<T>(MODE, 1, a, 0); }      \
  inline T __##P##sqrt_##SUFFIX(T a) { return emulator::root_in_mode<T>(MODE, a, 0, 0); }       \
  inline T FMA##SUFFIX(T a, T b, T c) {                                                         \
    return emulator::multiply_add_in_mode<T>(MODE, a, b, c);                                    \
  }
EMULATOR_ROUNDED(float, f, __fmaf_, rz, FE_TOWARDZERO)
EMULATOR_ROUNDED(float, f, __fmaf_, ru, FE_UPWARD)
EMULATOR_ROUNDED(float, f, __fmaf_, rd, FE_DOWNWARD)
EMULATOR_ROUNDED(double, d, __fma_, rz, FE_TOWARDZERO)
EMULATOR_ROUNDED(double, d, __fma_, ru, FE_UPWARD)
EMULATOR_ROUNDED(double, d, __fma_, rd, FE_DOWNWARD)
#undef EMULATOR_ROUNDED

#define EMULATOR_TO_NEAREST(T, P, FMA)                                                          \
  __forceinline__ T __##P##add_rn(T a, T b) { return a + b; }                                   \
  __forceinline__ T __##P##sub_rn(T a, T b) { return a - b; }                                   \
  __forceinline__ T __##P##mul_rn(T a, T b) { return a * b; }                                   \
  __forceinline__ T __##P##div_rn(T a, T b) { return a / b; }                                   \
  __forceinline__ T __##P##rcp_rn(T a) { return T(1) / a; }                                     \
  __forceinline__ T __##P##sqrt_rn(T a) { return std::sqrt(a); }                                \
  __forceinline__ T FMA(T a, T b, T c) { return std::fma(a, b, c); }
EMULATOR_TO_NEAREST(float, f, __fmaf_rn)
EMULATOR_TO_NEAREST(double, d, __fma_rn)
#undef EMULATOR_TO_NEAREST

// The root of a float in double has bits enough that the second rounding is as the first.
__forceinline__ float __frsqrt_rn(float x) { return float(1.0 / std::sqrt(double(x))); }
