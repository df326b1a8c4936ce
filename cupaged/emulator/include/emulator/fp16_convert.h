// The 16-bit float formats as bits: fp16 (1 + 5 + 10 bits) and bf16 (1 + 8 + 7 bits), to and from
// float and double in every rounding mode.
//
// Nothing is flushed to zero. A NaN is encoded as 0x7fff, as the device does; decoding keeps what a
// NaN carries and makes it quiet. fp16 uses the processor's own conversions where it has them,
// unless EMULATOR_SOFTWARE_FP16 is defined.
#pragma once

#include <cmath>

#include "emulator/bits.h"

namespace emulator {

enum class Rounding { nearest, zero, up, down };  // nearest: ties to even

// Encodes a double with one rounding; right for every input, but slow.
template <int EXPONENT_BITS, int FRACTION_BITS>
unsigned short encode_small_float(double value, Rounding rounding) {
  using u64 = unsigned long long;
  constexpr int LOWEST_EXPONENT = 2 - (1 << (EXPONENT_BITS - 1));  // of a normal number
  constexpr u64 INFINITY_CODE = ((u64(1) << EXPONENT_BITS) - 1) << FRACTION_BITS;

  if (value != value) return 0x7fff;
  const u64 bits = bits_as<u64>(value);
  const bool negative = (bits >> 63) != 0;
  const u64 sign = u64(negative) << 15;
  const int exponent_field = int(bits >> 52 & 0x7ff);
  if (exponent_field == 0x7ff) return static_cast<unsigned short>(sign | INFINITY_CODE);

  // value = significand * 2^(exponent - 52)
  const u64 fraction = bits & ((u64(1) << 52) - 1);
  const u64 significand = exponent_field == 0 ? fraction : fraction | u64(1) << 52;
  const int exponent = exponent_field == 0 ? -1022 : exponent_field - 1023;
  const int above = exponent > LOWEST_EXPONENT ? exponent - LOWEST_EXPONENT : 0;
  const int below = exponent < LOWEST_EXPONENT ? LOWEST_EXPONENT - exponent : 0;
  const int wanted_shift = 52 - FRACTION_BITS + below;
  const int shift = wanted_shift < 63 ? wanted_shift : 63;

  u64 kept = significand >> shift;
  const u64 rest = significand & ((u64(1) << shift) - 1);
  const u64 half = u64(1) << (shift - 1);
  switch (rounding) {
    case Rounding::nearest: kept += rest > half || (rest == half && (kept & 1)); break;
    case Rounding::zero: break;
    case Rounding::up: kept += rest != 0 && !negative; break;
    case Rounding::down: kept += rest != 0 && negative; break;
  }
  // A carry out of the fraction moves into the exponent, which is right.
  u64 code = (u64(above) << FRACTION_BITS) + kept;
  if (code >= INFINITY_CODE) {
    const bool away = rounding == Rounding::nearest ||
                      (rounding == Rounding::up && !negative) ||
                      (rounding == Rounding::down && negative);
    code = away ? INFINITY_CODE : INFINITY_CODE - 1;
  }
  return static_cast<unsigned short>(sign | code);
}

// Adds with a last bit that tells of anything lost (rounding to odd), so that rounding the sum
// again, to far fewer bits, is as good as rounding the exact sum.
inline double add_to_odd(double a, double b) {
  const double sum = a + b;
  if (!std::isfinite(sum)) return sum;
  const double b_part = sum - a;
  const double lost = (a - (sum - b_part)) + (b - b_part);  // exact: Knuth's two-sum
  const auto bits = bits_as<unsigned long long>(sum);
  if (lost == 0 || (bits & 1)) return sum;
  return bits_as<double>((lost > 0) == (sum > 0) ? bits + 1 : bits - 1);
}

// An integer as a double that is exact, or rounded to odd where it has more than 53 bits: right to
// be rounded again, to far fewer bits, in any mode.
inline double exact_double(unsigned long long value) {
  if (value >> 53 == 0) return double(value);
  const unsigned long long low = value & 0x7ff;
  return double((value & ~0x7ffULL) | (low != 0 ? 0x800ULL : 0ULL));
}
inline double exact_double(long long value) {
  return value < 0 ? -exact_double(0ULL - static_cast<unsigned long long>(value))
                   : exact_double(static_cast<unsigned long long>(value));
}
inline double exact_double(unsigned long value) {
  return exact_double(static_cast<unsigned long long>(value));
}
inline double exact_double(long value) { return exact_double(static_cast<long long>(value)); }
inline double exact_double(int value) { return value; }
inline double exact_double(unsigned int value) { return value; }

struct Fp16Format {
  static constexpr unsigned short ONE = 0x3c00;
  static constexpr unsigned short INFINITE = 0x7c00;

  static unsigned short from_double(double value, Rounding rounding = Rounding::nearest) {
    return encode_small_float<5, 10>(value, rounding);
  }

#if defined(__F16C__) && !defined(EMULATOR_SOFTWARE_FP16)
  static __forceinline__ float to_float(unsigned short code) {
    typedef short Eight __attribute__((vector_size(16)));
    const Eight codes = {static_cast<short>(code)};
    return __builtin_ia32_vcvtph2ps(codes)[0];
  }
  static __forceinline__ unsigned short from_float(float value) {
    typedef float Four __attribute__((vector_size(16)));
    const Four values = {value};
    const auto code = static_cast<unsigned short>(__builtin_ia32_vcvtps2ph(values, 0)[0]);
    return value != value ? 0x7fff : code;
  }
#elif defined(__ARM_FP16_FORMAT_IEEE) && !defined(EMULATOR_SOFTWARE_FP16)
  static __forceinline__ float to_float(unsigned short code) { return bits_as<__fp16>(code); }
  static __forceinline__ unsigned short from_float(float value) {
    return value != value ? 0x7fff : bits_as<unsigned short>(static_cast<__fp16>(value));
  }
#else
  static float to_float(unsigned short code) {
    const unsigned sign = unsigned(code & 0x8000) << 16;
    const unsigned magnitude = code & 0x7fff;
    if (magnitude > INFINITE) return bits_as<float>(sign | 0x7fc00000u | magnitude << 13);
    if (magnitude == INFINITE) return bits_as<float>(sign | 0x7f800000u);
    if (magnitude >= 0x0400) return bits_as<float>(sign | ((magnitude << 13) + (112u << 23)));
    const float small = float(magnitude) * 0x1p-24f;
    return bits_as<float>(sign | bits_as<unsigned>(small));
  }
  static unsigned short from_float(float value) { return from_double(value); }
#endif
};

struct Bf16Format {
  static constexpr unsigned short ONE = 0x3f80;
  static constexpr unsigned short INFINITE = 0x7f80;

  static unsigned short from_double(double value, Rounding rounding = Rounding::nearest) {
    return encode_small_float<8, 7>(value, rounding);
  }
  static __forceinline__ float to_float(unsigned short code) {
    return bits_as<float>(unsigned(code) << 16);
  }
  static __forceinline__ unsigned short from_float(float value) {
    const unsigned bits = bits_as<unsigned>(value);
    const unsigned rounded = bits + 0x7fff + (bits >> 16 & 1);
    return value != value ? 0x7fff : static_cast<unsigned short>(rounded >> 16);
  }
};

}  // namespace emulator
