// CUDA's math functions that the host's <math.h> lacks: float overloads, rsqrt, sinpi and the like,
// min and max for mixed types, and the fast approximations (__expf and its kin).
//
// The approximations are computed accurately: only their special cases (a large divisor, a negative
// base) are those of the device. Rounding modes are in rounded_arithmetic.h.
#pragma once

#include <math.h>
#include <stdlib.h>

#include <type_traits>

#include "emulator/rounded_arithmetic.h"

// Newer C libraries have some of these names: the same linkage and noexcept let both stand.
extern "C" {
inline double rsqrt(double x) noexcept { return 1.0 / sqrt(x); }
inline float rsqrtf(float x) noexcept { return float(1.0 / sqrt(double(x))); }
inline double sinpi(double x) noexcept {
  const double turn = fmod(x, 2.0);
  return turn == floor(turn) && !isnan(turn) ? copysign(0.0, x) : sin(turn * M_PI);
}
inline double cospi(double x) noexcept {
  const double turn = fabs(fmod(x, 2.0));
  return turn == 0.5 || turn == 1.5 ? 0.0 : cos(turn * M_PI);
}
inline float sinpif(float x) noexcept { return float(sinpi(double(x))); }
inline float cospif(float x) noexcept { return float(cospi(double(x))); }
}

inline double rcbrt(double x) { return 1.0 / cbrt(x); }
inline float rcbrtf(float x) { return float(1.0 / cbrt(double(x))); }
inline double rhypot(double x, double y) { return 1.0 / hypot(x, y); }
inline float rhypotf(float x, float y) { return float(1.0 / hypot(double(x), double(y))); }
inline double norm3d(double a, double b, double c) { return hypot(hypot(a, b), c); }
inline float norm3df(float a, float b, float c) { return float(norm3d(a, b, c)); }
inline double rnorm3d(double a, double b, double c) { return 1.0 / norm3d(a, b, c); }
inline float rnorm3df(float a, float b, float c) { return float(rnorm3d(a, b, c)); }
inline double norm4d(double a, double b, double c, double d) { return hypot(norm3d(a, b, c), d); }
inline float norm4df(float a, float b, float c, float d) { return float(norm4d(a, b, c, d)); }
inline double normcdf(double x) { return 0.5 * erfc(-x * M_SQRT1_2); }
inline float normcdff(float x) { return float(normcdf(double(x))); }

// Newton's method on erf, from Winitzki's closed approximation.
inline double erfinv(double y) {
  if (fabs(y) >= 1.0) return fabs(y) == 1.0 ? copysign(HUGE_VAL, y) : double(NAN);
  const double logarithm = log1p(-y * y);
  const double part = 2.0 / (M_PI * 0.147) + 0.5 * logarithm;
  double x = copysign(sqrt(sqrt(part * part - logarithm / 0.147) - part), y);
  for (int step = 0; step < 3; ++step) {
    // erfc keeps its digits where erf is close to one.
    const double missed = x > 0 ? (1.0 - y) - erfc(x) : erfc(-x) - (1.0 + y);
    x -= missed / (M_2_SQRTPI * exp(-x * x));
  }
  return x;
}
inline float erfinvf(float y) { return float(erfinv(double(y))); }
inline double normcdfinv(double p) { return M_SQRT2 * erfinv(2.0 * p - 1.0); }
inline float normcdfinvf(float p) { return float(normcdfinv(double(p))); }

// Overloads for float of functions that C has for double only.
__forceinline__ float rsqrt(float x) { return rsqrtf(x); }
__forceinline__ float rcbrt(float x) { return rcbrtf(x); }
__forceinline__ float sinpi(float x) { return sinpif(x); }
__forceinline__ float cospi(float x) { return cospif(x); }
__forceinline__ float exp10(float x) { return exp10f(x); }
__forceinline__ float erfinv(float x) { return erfinvf(x); }
__forceinline__ float normcdf(float x) { return normcdff(x); }
__forceinline__ float normcdfinv(float x) { return normcdfinvf(x); }
__forceinline__ void sincos(float x, float* sine, float* cosine) {
  *sine = sinf(x);
  *cosine = cosf(x);
}
__forceinline__ void sincospif(float x, float* sine, float* cosine) {
  *sine = sinpif(x);
  *cosine = cospif(x);
}
__forceinline__ void sincospi(float x, float* sine, float* cosine) { sincospif(x, sine, cosine); }
__forceinline__ void sincospi(double x, double* sine, double* cosine) {
  *sine = sinpi(x);
  *cosine = cospi(x);
}

__forceinline__ float fdividef(float x, float y) { return x / y; }

// --- fast approximations ---

// The device gives 0 for a divisor above 2^126, and NaN if the dividend is infinite too.
__forceinline__ float __fdividef(float x, float y) {
  const float size = fabsf(y);
  return size > 0x1p126f && size < HUGE_VALF ? x * 0.0f : x / y;
}
__forceinline__ float __expf(float x) { return expf(x); }
__forceinline__ float __exp10f(float x) { return exp10f(x); }
__forceinline__ float __logf(float x) { return logf(x); }
__forceinline__ float __log2f(float x) { return log2f(x); }
__forceinline__ float __log10f(float x) { return log10f(x); }
__forceinline__ float __sinf(float x) { return sinf(x); }
__forceinline__ float __cosf(float x) { return cosf(x); }
__forceinline__ float __tanf(float x) { return tanf(x); }
__forceinline__ float __tanhf(float x) { return tanhf(x); }
__forceinline__ void __sincosf(float x, float* sine, float* cosine) { sincos(x, sine, cosine); }
// By way of the logarithm, so a negative base gives NaN even for a whole exponent.
__forceinline__ float __powf(float x, float y) {
  return float(exp2(double(y) * log2(double(x))));
}
// Clamps to [0, 1]; NaN becomes 0.
__forceinline__ float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

// --- min and max ---

// Mixed types compare in the type that the language's arithmetic would give them.
#define EMULATOR_MIN_MAX(A, B)                                                                  \
  constexpr auto min(A a, B b) {                                                                \
    using Common = decltype(a + b);                                                             \
    return Common(b) < Common(a) ? Common(b) : Common(a);                                       \
  }                                                                                             \
  constexpr auto max(A a, B b) {                                                                \
    using Common = decltype(a + b);                                                             \
    return Common(a) < Common(b) ? Common(b) : Common(a);                                       \
  }
EMULATOR_MIN_MAX(int, int)
EMULATOR_MIN_MAX(int, unsigned int)
EMULATOR_MIN_MAX(unsigned int, int)
EMULATOR_MIN_MAX(unsigned int, unsigned int)
EMULATOR_MIN_MAX(long, long)
EMULATOR_MIN_MAX(long, unsigned long)
EMULATOR_MIN_MAX(unsigned long, long)
EMULATOR_MIN_MAX(unsigned long, unsigned long)
EMULATOR_MIN_MAX(long long, long long)
EMULATOR_MIN_MAX(long long, unsigned long long)
EMULATOR_MIN_MAX(unsigned long long, long long)
EMULATOR_MIN_MAX(unsigned long long, unsigned long long)
#undef EMULATOR_MIN_MAX

// As fminf and fmaxf: a NaN loses against a number.
__forceinline__ float min(float a, float b) { return fminf(a, b); }
__forceinline__ float max(float a, float b) { return fmaxf(a, b); }
__forceinline__ double min(double a, double b) { return fmin(a, b); }
__forceinline__ double max(double a, double b) { return fmax(a, b); }
__forceinline__ double min(float a, double b) { return fmin(double(a), b); }
__forceinline__ double max(float a, double b) { return fmax(double(a), b); }
__forceinline__ double min(double a, float b) { return fmin(a, double(b)); }
__forceinline__ double max(double a, float b) { return fmax(a, double(b)); }

__forceinline__ unsigned int umin(unsigned int a, unsigned int b) { return min(a, b); }
__forceinline__ unsigned int umax(unsigned int a, unsigned int b) { return max(a, b); }
__forceinline__ long long llmin(long long a, long long b) { return min(a, b); }
__forceinline__ long long llmax(long long a, long long b) { return max(a, b); }
__forceinline__ unsigned long long ullmin(unsigned long long a, unsigned long long b) {
  return min(a, b);
}
__forceinline__ unsigned long long ullmax(unsigned long long a, unsigned long long b) {
  return max(a, b);
}

