// Conversions between integers and floats with the rounding in the name, and bit casts.
//
// Float to integer saturates. NaN becomes 0, except that from double and to 64 bits it becomes the
// number with only the highest bit set: this is what the device's cvt does. A plain cast of a value
// out of range, (int)1e20f, is the host's and may differ.
#pragma once

#include <cfenv>
#include <cmath>
#include <limits>

#include "emulator/bits.h"

namespace emulator {

template <class Int, class Float>
inline Int float_to_integer(Float value) {
  using Limits = std::numeric_limits<Int>;
  constexpr bool NAN_IS_ZERO = sizeof(Float) == 4 && sizeof(Int) <= 4;
  constexpr Int HIGHEST_BIT = Int(Limits::is_signed ? Limits::min() : Limits::max() / 2 + 1);
  constexpr Float ABOVE = Float(Limits::max() / 2 + 1) * 2;  // one more than the maximum
  if (value != value) return NAN_IS_ZERO ? Int(0) : HIGHEST_BIT;
  if (value >= ABOVE) return Limits::max();
  if (value <= Float(Limits::min())) return Limits::min();
  return static_cast<Int>(value);
}

template <class Int>
inline Int truncated(float value) {
  return float_to_integer<Int>(std::trunc(value));
}

// In the rounding mode given; the volatile operand keeps the conversion between the two calls.
template <class To, class From>
EMULATOR_UNCHECKED To convert_in_mode(int mode, From value) {
  volatile From from = value;
  std::fesetround(mode);
  volatile To result = static_cast<To>(from);
  std::fesetround(FE_TONEAREST);
  return result;
}

}  // namespace emulator

#define EMULATOR_FLOAT_TO_INTEGER(FLOAT, FROM, INT, TO)                                         \
  inline INT __##FROM##2##TO##_rn(FLOAT x) {                                                    \
    return emulator::float_to_integer<INT, FLOAT>(std::nearbyint(x));                           \
  }                                                                                             \
  inline INT __##FROM##2##TO##_rz(FLOAT x) {                                                    \
    return emulator::float_to_integer<INT, FLOAT>(std::trunc(x));                               \
  }                                                                                             \
  inline INT __##FROM##2##TO##_ru(FLOAT x) {                                                    \
    return emulator::float_to_integer<INT, FLOAT>(std::ceil(x));                                \
  }                                                                                             \
  inline INT __##FROM##2##TO##_rd(FLOAT x) {                                                    \
    return emulator::float_to_integer<INT, FLOAT>(std::floor(x));                               \
  }
EMULATOR_FLOAT_TO_INTEGER(float, float, int, int)
EMULATOR_FLOAT_TO_INTEGER(float, float, unsigned int, uint)
EMULATOR_FLOAT_TO_INTEGER(float, float, long long, ll)
EMULATOR_FLOAT_TO_INTEGER(float, float, unsigned long long, ull)
EMULATOR_FLOAT_TO_INTEGER(double, double, int, int)
EMULATOR_FLOAT_TO_INTEGER(double, double, unsigned int, uint)
EMULATOR_FLOAT_TO_INTEGER(double, double, long long, ll)
EMULATOR_FLOAT_TO_INTEGER(double, double, unsigned long long, ull)
#undef EMULATOR_FLOAT_TO_INTEGER

#define EMULATOR_TO_FLOAT(FROM_TYPE, FROM, FLOAT, TO)                                           \
  __forceinline__ FLOAT __##FROM##2##TO##_rn(FROM_TYPE x) { return static_cast<FLOAT>(x); }     \
  inline FLOAT __##FROM##2##TO##_rz(FROM_TYPE x) {                                              \
    return emulator::convert_in_mode<FLOAT>(FE_TOWARDZERO, x);                                  \
  }                                                                                             \
  inline FLOAT __##FROM##2##TO##_ru(FROM_TYPE x) {                                              \
    return emulator::convert_in_mode<FLOAT>(FE_UPWARD, x);                                      \
  }                                                                                             \
  inline FLOAT __##FROM##2##TO##_rd(FROM_TYPE x) {                                              \
    return emulator::convert_in_mode<FLOAT>(FE_DOWNWARD, x);                                    \
  }
EMULATOR_TO_FLOAT(int, int, float, float)
EMULATOR_TO_FLOAT(unsigned int, uint, float, float)
EMULATOR_TO_FLOAT(long long, ll, float, float)
EMULATOR_TO_FLOAT(unsigned long long, ull, float, float)
EMULATOR_TO_FLOAT(double, double, float, float)
EMULATOR_TO_FLOAT(long long, ll, double, double)
EMULATOR_TO_FLOAT(unsigned long long, ull, double, double)
#undef EMULATOR_TO_FLOAT
__forceinline__ double __int2double_rn(int x) { return x; }
__forceinline__ double __uint2double_rn(unsigned int x) { return x; }

// --- bit casts ---

__forceinline__ int __float_as_int(float x) { return emulator::bits_as<int>(x); }
__forceinline__ unsigned int __float_as_uint(float x) { return emulator::bits_as<unsigned>(x); }
__forceinline__ float __int_as_float(int x) { return emulator::bits_as<float>(x); }
__forceinline__ float __uint_as_float(unsigned int x) { return emulator::bits_as<float>(x); }
__forceinline__ long long __double_as_longlong(double x) {
  return emulator::bits_as<long long>(x);
}
__forceinline__ double __longlong_as_double(long long x) { return emulator::bits_as<double>(x); }
__forceinline__ int __double2hiint(double x) {
  return static_cast<int>(__double_as_longlong(x) >> 32);
}
__forceinline__ int __double2loint(double x) { return static_cast<int>(__double_as_longlong(x)); }
__forceinline__ double __hiloint2double(int high, int low) {
  const auto both = static_cast<unsigned long long>(static_cast<unsigned>(high)) << 32;
  return emulator::bits_as<double>(both | static_cast<unsigned>(low));
}
