// The text of the functions on one 16-bit float type and its pair: arithmetic, comparisons, math,
// shuffles, atomics. Included once a type, after float16_type.h, with the same macros defined.
//
// Sums, products, quotients and __hfma are rounded once, to nearest. The functions h...() compute
// in float and round; the device's may differ from them in the last bit. NaN results are 0x7fff.

// --- arithmetic ---

// Rounding to float first changes nothing: float has more than twice the bits, also where the
// result is subnormal.
__forceinline__ FLOAT16 __hadd(FLOAT16 a, FLOAT16 b) { return FLOAT16(float(a) + float(b)); }
__forceinline__ FLOAT16 __hsub(FLOAT16 a, FLOAT16 b) { return FLOAT16(float(a) - float(b)); }
__forceinline__ FLOAT16 __hmul(FLOAT16 a, FLOAT16 b) { return FLOAT16(float(a) * float(b)); }
__forceinline__ FLOAT16 __hdiv(FLOAT16 a, FLOAT16 b) { return FLOAT16(float(a) / float(b)); }
inline FLOAT16 __hfma(FLOAT16 a, FLOAT16 b, FLOAT16 c) {
  // The product is exact in double.
  return FLOAT16(emulator::add_to_odd(double(float(a)) * double(float(b)), double(float(c))));
}
__forceinline__ FLOAT16 __hadd_rn(FLOAT16 a, FLOAT16 b) { return __hadd(a, b); }
__forceinline__ FLOAT16 __hsub_rn(FLOAT16 a, FLOAT16 b) { return __hsub(a, b); }
__forceinline__ FLOAT16 __hmul_rn(FLOAT16 a, FLOAT16 b) { return __hmul(a, b); }

// Signs change without rounding, of NaN too.
__forceinline__ FLOAT16 __hneg(FLOAT16 a) {
  return FLOAT16_RAW{static_cast<unsigned short>(emulator::code_of(a) ^ 0x8000)};
}
__forceinline__ FLOAT16 __habs(FLOAT16 a) {
  return FLOAT16_RAW{static_cast<unsigned short>(emulator::code_of(a) & 0x7fff)};
}

namespace emulator {

__forceinline__ bool is_nan(FLOAT16 a) { return (code_of(a) & 0x7fff) > FLOAT16_FORMAT::INFINITE; }
// To [0, 1]; NaN becomes 0.
__forceinline__ FLOAT16 saturate(FLOAT16 a) { return FLOAT16(__saturatef(float(a))); }
__forceinline__ FLOAT16 at_least_zero(FLOAT16 a) {
  return is_nan(a) || float(a) > 0.0f ? a : FLOAT16(0.0f);
}
__forceinline__ FLOAT16 truth(FLOAT16, bool holds) {
  return FLOAT16_RAW{holds ? FLOAT16_FORMAT::ONE : static_cast<unsigned short>(0)};
}

}  // namespace emulator

__forceinline__ FLOAT16 __hadd_sat(FLOAT16 a, FLOAT16 b) {
  return emulator::saturate(__hadd(a, b));
}
__forceinline__ FLOAT16 __hsub_sat(FLOAT16 a, FLOAT16 b) {
  return emulator::saturate(__hsub(a, b));
}
__forceinline__ FLOAT16 __hmul_sat(FLOAT16 a, FLOAT16 b) {
  return emulator::saturate(__hmul(a, b));
}
__forceinline__ FLOAT16 __hfma_sat(FLOAT16 a, FLOAT16 b, FLOAT16 c) {
  return emulator::saturate(__hfma(a, b, c));
}
__forceinline__ FLOAT16 __hfma_relu(FLOAT16 a, FLOAT16 b, FLOAT16 c) {
  return emulator::at_least_zero(__hfma(a, b, c));
}

// Of a number and a NaN the number; +0 is above -0. The _nan forms give NaN if either is.
inline FLOAT16 __hmax_nan(FLOAT16 a, FLOAT16 b) {
  if (emulator::is_nan(a) || emulator::is_nan(b)) return FLOAT16_RAW{0x7fff};
  if (float(a) == float(b)) return emulator::code_of(a) & 0x8000 ? b : a;
  return float(a) > float(b) ? a : b;
}
inline FLOAT16 __hmin_nan(FLOAT16 a, FLOAT16 b) {
  if (emulator::is_nan(a) || emulator::is_nan(b)) return FLOAT16_RAW{0x7fff};
  if (float(a) == float(b)) return emulator::code_of(a) & 0x8000 ? a : b;
  return float(a) < float(b) ? a : b;
}
inline FLOAT16 __hmax(FLOAT16 a, FLOAT16 b) {
  if (emulator::is_nan(a) != emulator::is_nan(b)) return emulator::is_nan(a) ? b : a;
  return __hmax_nan(a, b);
}
inline FLOAT16 __hmin(FLOAT16 a, FLOAT16 b) {
  if (emulator::is_nan(a) != emulator::is_nan(b)) return emulator::is_nan(a) ? b : a;
  return __hmin_nan(a, b);
}

#define EMULATOR_PAIR_1(PAIR, SINGLE)                                                           \
  __forceinline__ FLOAT16X2 PAIR(FLOAT16X2 a) { return {SINGLE(a.x), SINGLE(a.y)}; }
#define EMULATOR_PAIR_2(PAIR, SINGLE)                                                           \
  __forceinline__ FLOAT16X2 PAIR(FLOAT16X2 a, FLOAT16X2 b) {                                    \
    return {SINGLE(a.x, b.x), SINGLE(a.y, b.y)};                                                \
  }
#define EMULATOR_PAIR_3(PAIR, SINGLE)                                                           \
  __forceinline__ FLOAT16X2 PAIR(FLOAT16X2 a, FLOAT16X2 b, FLOAT16X2 c) {                       \
    return {SINGLE(a.x, b.x, c.x), SINGLE(a.y, b.y, c.y)};                                      \
  }
EMULATOR_PAIR_1(__hneg2, __hneg)
EMULATOR_PAIR_1(__habs2, __habs)
EMULATOR_PAIR_2(__hadd2, __hadd)
EMULATOR_PAIR_2(__hsub2, __hsub)
EMULATOR_PAIR_2(__hmul2, __hmul)
EMULATOR_PAIR_2(__h2div, __hdiv)
EMULATOR_PAIR_2(__hadd2_rn, __hadd)
EMULATOR_PAIR_2(__hsub2_rn, __hsub)
EMULATOR_PAIR_2(__hmul2_rn, __hmul)
EMULATOR_PAIR_2(__hadd2_sat, __hadd_sat)
EMULATOR_PAIR_2(__hsub2_sat, __hsub_sat)
EMULATOR_PAIR_2(__hmul2_sat, __hmul_sat)
EMULATOR_PAIR_2(__hmax2, __hmax)
EMULATOR_PAIR_2(__hmin2, __hmin)
EMULATOR_PAIR_2(__hmax2_nan, __hmax_nan)
EMULATOR_PAIR_2(__hmin2_nan, __hmin_nan)
EMULATOR_PAIR_3(__hfma2, __hfma)
EMULATOR_PAIR_3(__hfma2_sat, __hfma_sat)
EMULATOR_PAIR_3(__hfma2_relu, __hfma_relu)

// a * b + c of complex numbers (x real, y imaginary), by four fused steps.
inline FLOAT16X2 __hcmadd(FLOAT16X2 a, FLOAT16X2 b, FLOAT16X2 c) {
  const FLOAT16 real = __hfma(a.x, b.x, c.x);
  const FLOAT16 imaginary = __hfma(a.x, b.y, c.y);
  return {__hfma(__hneg(a.y), b.y, real), __hfma(a.y, b.x, imaginary)};
}

// --- math ---

#define EMULATOR_MATH(NAME, PAIR, EXPRESSION)                                                   \
  inline FLOAT16 NAME(FLOAT16 a) {                                                              \
    const float x = float(a);                                                                   \
    return FLOAT16(EXPRESSION);                                                                 \
  }                                                                                             \
  EMULATOR_PAIR_1(PAIR, NAME)
EMULATOR_MATH(hsqrt, h2sqrt, std::sqrt(x))
EMULATOR_MATH(hrsqrt, h2rsqrt, rsqrtf(x))
EMULATOR_MATH(hrcp, h2rcp, 1.0f / x)
EMULATOR_MATH(hexp, h2exp, expf(x))
EMULATOR_MATH(hexp2, h2exp2, exp2f(x))
EMULATOR_MATH(hexp10, h2exp10, exp10f(x))
EMULATOR_MATH(hlog, h2log, logf(x))
EMULATOR_MATH(hlog2, h2log2, log2f(x))
EMULATOR_MATH(hlog10, h2log10, log10f(x))
EMULATOR_MATH(hsin, h2sin, sinf(x))
EMULATOR_MATH(hcos, h2cos, cosf(x))
EMULATOR_MATH(htanh, h2tanh, tanhf(x))
EMULATOR_MATH(htanh_approx, h2tanh_approx, tanhf(x))
EMULATOR_MATH(hceil, h2ceil, std::ceil(x))
EMULATOR_MATH(hfloor, h2floor, std::floor(x))
EMULATOR_MATH(htrunc, h2trunc, std::trunc(x))
EMULATOR_MATH(hrint, h2rint, std::nearbyint(x))
#undef EMULATOR_MATH

// --- comparisons: the forms ending in u are true if either is NaN, the others then false ---

__forceinline__ bool __hisnan(FLOAT16 a) { return emulator::is_nan(a); }
__forceinline__ FLOAT16X2 __hisnan2(FLOAT16X2 a) {
  return {emulator::truth(a.x, __hisnan(a.x)), emulator::truth(a.y, __hisnan(a.y))};
}
// 1 for inf, -1 for -inf, else 0.
__forceinline__ int __hisinf(FLOAT16 a) {
  const unsigned short code = emulator::code_of(a);
  if ((code & 0x7fff) != FLOAT16_FORMAT::INFINITE) return 0;
  return code & 0x8000 ? -1 : 1;
}

// One (true) or zero per half; all ones or zero per half (mask); true if both hold (b).
#define EMULATOR_COMPARE_PAIR(OP, U)                                                            \
  __forceinline__ FLOAT16X2 __h##OP##U##2(FLOAT16X2 a, FLOAT16X2 b) {                           \
    return {emulator::truth(a.x, __h##OP##U(a.x, b.x)),                                         \
            emulator::truth(a.y, __h##OP##U(a.y, b.y))};                                        \
  }                                                                                             \
  __forceinline__ unsigned int __h##OP##U##2_mask(FLOAT16X2 a, FLOAT16X2 b) {                   \
    return (__h##OP##U(a.x, b.x) ? 0xffffu : 0u) | (__h##OP##U(a.y, b.y) ? 0xffff0000u : 0u);   \
  }                                                                                             \
  __forceinline__ bool __hb##OP##U##2(FLOAT16X2 a, FLOAT16X2 b) {                               \
    return __h##OP##U(a.x, b.x) && __h##OP##U(a.y, b.y);                                        \
  }
#define EMULATOR_COMPARE(OP, SIGN)                                                              \
  __forceinline__ bool __h##OP(FLOAT16 a, FLOAT16 b) {                                          \
    return !__hisnan(a) && !__hisnan(b) && float(a) SIGN float(b);                              \
  }                                                                                             \
  __forceinline__ bool __h##OP##u(FLOAT16 a, FLOAT16 b) {                                       \
    return __hisnan(a) || __hisnan(b) || float(a) SIGN float(b);                                \
  }                                                                                             \
  EMULATOR_COMPARE_PAIR(OP, )                                                                   \
  EMULATOR_COMPARE_PAIR(OP, u)
EMULATOR_COMPARE(eq, ==)
EMULATOR_COMPARE(ne, !=)
EMULATOR_COMPARE(lt, <)
EMULATOR_COMPARE(le, <=)
EMULATOR_COMPARE(gt, >)
EMULATOR_COMPARE(ge, >=)
#undef EMULATOR_COMPARE
#undef EMULATOR_COMPARE_PAIR

// --- operators ---

#define EMULATOR_ARITHMETIC(T, SIGN, FUNCTION)                                                  \
  __forceinline__ T operator SIGN(const T& a, const T& b) { return FUNCTION(a, b); }            \
  __forceinline__ T& operator SIGN##=(T& a, const T& b) { return a = FUNCTION(a, b); }
#define EMULATOR_STEP(T, SIGN, FUNCTION, ONE)                                                   \
  __forceinline__ T& operator SIGN(T& a) { return a = FUNCTION(a, ONE); }                       \
  __forceinline__ T operator SIGN(T& a, int) {                                                  \
    const T before = a;                                                                         \
    a = FUNCTION(a, ONE);                                                                       \
    return before;                                                                              \
  }
#define EMULATOR_RELATION(SIGN, SINGLE, PAIR)                                                   \
  __forceinline__ bool operator SIGN(const FLOAT16& a, const FLOAT16& b) { return SINGLE(a, b); } \
  __forceinline__ bool operator SIGN(const FLOAT16X2& a, const FLOAT16X2& b) { return PAIR(a, b); }
EMULATOR_ARITHMETIC(FLOAT16, +, __hadd)
EMULATOR_ARITHMETIC(FLOAT16, -, __hsub)
EMULATOR_ARITHMETIC(FLOAT16, *, __hmul)
EMULATOR_ARITHMETIC(FLOAT16, /, __hdiv)
EMULATOR_ARITHMETIC(FLOAT16X2, +, __hadd2)
EMULATOR_ARITHMETIC(FLOAT16X2, -, __hsub2)
EMULATOR_ARITHMETIC(FLOAT16X2, *, __hmul2)
EMULATOR_ARITHMETIC(FLOAT16X2, /, __h2div)
EMULATOR_STEP(FLOAT16, ++, __hadd, FLOAT16(1.0f))
EMULATOR_STEP(FLOAT16, --, __hsub, FLOAT16(1.0f))
EMULATOR_STEP(FLOAT16X2, ++, __hadd2, FLOAT16X2(1.0f, 1.0f))
EMULATOR_STEP(FLOAT16X2, --, __hsub2, FLOAT16X2(1.0f, 1.0f))
EMULATOR_RELATION(==, __heq, __hbeq2)
EMULATOR_RELATION(!=, __hneu, __hbneu2)
EMULATOR_RELATION(<, __hlt, __hblt2)
EMULATOR_RELATION(<=, __hle, __hble2)
EMULATOR_RELATION(>, __hgt, __hbgt2)
EMULATOR_RELATION(>=, __hge, __hbge2)
__forceinline__ FLOAT16 operator+(const FLOAT16& a) { return a; }
__forceinline__ FLOAT16 operator-(const FLOAT16& a) { return __hneg(a); }
__forceinline__ FLOAT16X2 operator+(const FLOAT16X2& a) { return a; }
__forceinline__ FLOAT16X2 operator-(const FLOAT16X2& a) { return __hneg2(a); }
#undef EMULATOR_RELATION
#undef EMULATOR_STEP
#undef EMULATOR_ARITHMETIC
#undef EMULATOR_PAIR_3
#undef EMULATOR_PAIR_2
#undef EMULATOR_PAIR_1

// --- between threads ---

EMULATOR_SHUFFLES(FLOAT16)
EMULATOR_SHUFFLES(FLOAT16X2)

__forceinline__ FLOAT16 atomicAdd(FLOAT16* address, FLOAT16 value) {
  return emulator::atomic_update(address, value, emulator::Add{});
}
// Each half is added atomically; here the pair is too.
__forceinline__ FLOAT16X2 atomicAdd(FLOAT16X2* address, FLOAT16X2 value) {
  return emulator::atomic_update(address, value, emulator::Add{});
}
