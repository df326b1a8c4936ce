// The text of one 16-bit float type, its pair, and their conversions. cuda_fp16.h and cuda_bf16.h
// include it once each, hence no include guard. They define before:
//
//   FLOAT16, FLOAT16_RAW       the type, and the plain struct of its bits     (__half, __half_raw)
//   FLOAT16X2, FLOAT16X2_RAW   the same for the pair
//   FLOAT16_FORMAT             Fp16Format or Bf16Format
//   FLOAT16_NAMED(a, b)        a##half##b or a##bfloat16##b, the way functions are named
//
// Implicit conversions are those of the device's headers: what is ambiguous there is so here.

struct alignas(2) FLOAT16_RAW {
  unsigned short x;
};

struct alignas(4) FLOAT16X2_RAW {
  unsigned short x, y;
};

struct alignas(2) FLOAT16 {
 protected:
  unsigned short __x;

 public:
  FLOAT16() = default;
  __forceinline__ constexpr FLOAT16(const FLOAT16_RAW& raw) : __x(raw.x) {}
  __forceinline__ FLOAT16(float value) : __x(FLOAT16_FORMAT::from_float(value)) {}
  __forceinline__ FLOAT16(double value) : __x(FLOAT16_FORMAT::from_double(value)) {}
  __forceinline__ FLOAT16(short value) : FLOAT16(float(value)) {}
  __forceinline__ FLOAT16(unsigned short value) : FLOAT16(float(value)) {}
  __forceinline__ FLOAT16(int value) : FLOAT16(emulator::exact_double(value)) {}
  __forceinline__ FLOAT16(unsigned int value) : FLOAT16(emulator::exact_double(value)) {}
  __forceinline__ FLOAT16(long value) : FLOAT16(emulator::exact_double(value)) {}
  __forceinline__ FLOAT16(unsigned long value) : FLOAT16(emulator::exact_double(value)) {}
  __forceinline__ FLOAT16(long long value) : FLOAT16(emulator::exact_double(value)) {}
  __forceinline__ FLOAT16(unsigned long long value) : FLOAT16(emulator::exact_double(value)) {}

  __forceinline__ operator FLOAT16_RAW() const { return FLOAT16_RAW{__x}; }
  __forceinline__ operator float() const { return FLOAT16_FORMAT::to_float(__x); }
#define EMULATOR_TO_INTEGER(INT) \
  __forceinline__ operator INT() const { return emulator::truncated<INT>(float(*this)); }
  EMULATOR_TO_INTEGER(signed char)
  EMULATOR_TO_INTEGER(unsigned char)
  EMULATOR_TO_INTEGER(char)
  EMULATOR_TO_INTEGER(short)
  EMULATOR_TO_INTEGER(unsigned short)
  EMULATOR_TO_INTEGER(int)
  EMULATOR_TO_INTEGER(unsigned int)
  EMULATOR_TO_INTEGER(long)
  EMULATOR_TO_INTEGER(unsigned long)
  EMULATOR_TO_INTEGER(long long)
  EMULATOR_TO_INTEGER(unsigned long long)
#undef EMULATOR_TO_INTEGER
  __forceinline__ constexpr operator bool() const { return (__x & 0x7fff) != 0; }

  __forceinline__ FLOAT16& operator=(const FLOAT16_RAW& raw) { return *this = FLOAT16(raw); }
  __forceinline__ FLOAT16& operator=(float value) { return *this = FLOAT16(value); }
  __forceinline__ FLOAT16& operator=(double value) { return *this = FLOAT16(value); }
  __forceinline__ FLOAT16& operator=(short value) { return *this = FLOAT16(value); }
  __forceinline__ FLOAT16& operator=(unsigned short value) { return *this = FLOAT16(value); }
  __forceinline__ FLOAT16& operator=(int value) { return *this = FLOAT16(value); }
  __forceinline__ FLOAT16& operator=(unsigned int value) { return *this = FLOAT16(value); }
  __forceinline__ FLOAT16& operator=(long long value) { return *this = FLOAT16(value); }
  __forceinline__ FLOAT16& operator=(unsigned long long value) { return *this = FLOAT16(value); }
};

// Copied as one 4-byte access, as on the device.
struct alignas(4) FLOAT16X2 {
  FLOAT16 x, y;

  FLOAT16X2() = default;
  __forceinline__ constexpr FLOAT16X2(const FLOAT16& a, const FLOAT16& b) : x(a), y(b) {}
  __forceinline__ FLOAT16X2(const FLOAT16X2_RAW& raw)
      : x(FLOAT16_RAW{raw.x}), y(FLOAT16_RAW{raw.y}) {}
  __forceinline__ operator FLOAT16X2_RAW() const {
    return FLOAT16X2_RAW{FLOAT16_RAW(x).x, FLOAT16_RAW(y).x};
  }
};

namespace emulator {

__forceinline__ unsigned short code_of(FLOAT16 value) { return FLOAT16_RAW(value).x; }

}  // namespace emulator

// --- float and double ---

__forceinline__ FLOAT16 FLOAT16_NAMED(__float2, )(float a) { return FLOAT16(a); }
__forceinline__ FLOAT16 FLOAT16_NAMED(__float2, _rn)(float a) { return FLOAT16(a); }
__forceinline__ FLOAT16 FLOAT16_NAMED(__double2, )(double a) { return FLOAT16(a); }
__forceinline__ float FLOAT16_NAMED(__, 2float)(FLOAT16 a) { return float(a); }

#define EMULATOR_FROM_FLOAT(SUFFIX, ROUNDING)                                                   \
  inline FLOAT16 FLOAT16_NAMED(__float2, SUFFIX)(float a) {                                     \
    return FLOAT16_RAW{FLOAT16_FORMAT::from_double(a, emulator::Rounding::ROUNDING)};           \
  }
EMULATOR_FROM_FLOAT(_rz, zero)
EMULATOR_FROM_FLOAT(_ru, up)
EMULATOR_FROM_FLOAT(_rd, down)
#undef EMULATOR_FROM_FLOAT

// --- integers: __int2half_rn ... __half2ull_rd; values out of range saturate ---

#define EMULATOR_FROM_INTEGER(INT, FROM, SUFFIX, ROUNDING)                                      \
  inline FLOAT16 FLOAT16_NAMED(__##FROM##2, SUFFIX)(INT a) {                                    \
    return FLOAT16_RAW{FLOAT16_FORMAT::from_double(emulator::exact_double(a),                   \
                                                   emulator::Rounding::ROUNDING)};              \
  }
#define EMULATOR_TO_INTEGER(INT, TO, SUFFIX, FUNCTION)                                          \
  inline INT FLOAT16_NAMED(__, 2##TO##SUFFIX)(FLOAT16 a) {                                      \
    return emulator::float_to_integer<INT>(std::FUNCTION(float(a)));                           \
  }
#define EMULATOR_INTEGER(INT, NAME)                                                             \
  EMULATOR_FROM_INTEGER(INT, NAME, _rn, nearest)                                                \
  EMULATOR_FROM_INTEGER(INT, NAME, _rz, zero)                                                   \
  EMULATOR_FROM_INTEGER(INT, NAME, _ru, up)                                                     \
  EMULATOR_FROM_INTEGER(INT, NAME, _rd, down)                                                   \
  EMULATOR_TO_INTEGER(INT, NAME, _rn, nearbyint)                                                \
  EMULATOR_TO_INTEGER(INT, NAME, _rz, trunc)                                                    \
  EMULATOR_TO_INTEGER(INT, NAME, _ru, ceil)                                                     \
  EMULATOR_TO_INTEGER(INT, NAME, _rd, floor)
EMULATOR_INTEGER(short, short)
EMULATOR_INTEGER(unsigned short, ushort)
EMULATOR_INTEGER(int, int)
EMULATOR_INTEGER(unsigned int, uint)
EMULATOR_INTEGER(long long, ll)
EMULATOR_INTEGER(unsigned long long, ull)
EMULATOR_TO_INTEGER(signed char, char, _rz, trunc)
EMULATOR_TO_INTEGER(unsigned char, uchar, _rz, trunc)
#undef EMULATOR_INTEGER
#undef EMULATOR_TO_INTEGER
#undef EMULATOR_FROM_INTEGER

// --- bits ---

__forceinline__ short FLOAT16_NAMED(__, _as_short)(FLOAT16 a) {
  return static_cast<short>(emulator::code_of(a));
}
__forceinline__ unsigned short FLOAT16_NAMED(__, _as_ushort)(FLOAT16 a) {
  return emulator::code_of(a);
}
__forceinline__ FLOAT16 FLOAT16_NAMED(__short_as_, )(short a) {
  return FLOAT16_RAW{static_cast<unsigned short>(a)};
}
__forceinline__ constexpr FLOAT16 FLOAT16_NAMED(__ushort_as_, )(unsigned short a) {
  return FLOAT16_RAW{a};
}

// --- pairs: x is the low half, y the high one ---

__forceinline__ FLOAT16X2 FLOAT16_NAMED(make_, 2)(FLOAT16 x, FLOAT16 y) { return {x, y}; }
__forceinline__ FLOAT16X2 FLOAT16_NAMED(__halves2, 2)(FLOAT16 a, FLOAT16 b) { return {a, b}; }
__forceinline__ FLOAT16X2 FLOAT16_NAMED(__float2, 2_rn)(float a) { return {a, a}; }
__forceinline__ FLOAT16X2 FLOAT16_NAMED(__floats2, 2_rn)(float a, float b) { return {a, b}; }
__forceinline__ FLOAT16X2 FLOAT16_NAMED(__float22, 2_rn)(float2 a) { return {a.x, a.y}; }
__forceinline__ float2 FLOAT16_NAMED(__, 22float2)(FLOAT16X2 a) {
  return make_float2(float(a.x), float(a.y));
}
__forceinline__ FLOAT16 FLOAT16_NAMED(__low2, )(FLOAT16X2 a) { return a.x; }
__forceinline__ FLOAT16 FLOAT16_NAMED(__high2, )(FLOAT16X2 a) { return a.y; }
__forceinline__ FLOAT16X2 FLOAT16_NAMED(__low2, 2)(FLOAT16X2 a) { return {a.x, a.x}; }
__forceinline__ FLOAT16X2 FLOAT16_NAMED(__high2, 2)(FLOAT16X2 a) { return {a.y, a.y}; }
__forceinline__ FLOAT16X2 FLOAT16_NAMED(__lows2, 2)(FLOAT16X2 a, FLOAT16X2 b) {
  return {a.x, b.x};
}
__forceinline__ FLOAT16X2 FLOAT16_NAMED(__highs2, 2)(FLOAT16X2 a, FLOAT16X2 b) {
  return {a.y, b.y};
}
__forceinline__ float __low2float(FLOAT16X2 a) { return float(a.x); }
__forceinline__ float __high2float(FLOAT16X2 a) { return float(a.y); }
__forceinline__ FLOAT16X2 __lowhigh2highlow(FLOAT16X2 a) { return {a.y, a.x}; }
