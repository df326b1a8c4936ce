// CUDA's vector types (char1 to double4), their make_ functions, and dim3.
//
// Sizes and alignments are those of the device: a pair is aligned to its size, four elements to
// their size but at most to 16 bytes, one and three elements to the element.
#pragma once

#define EMULATOR_VECTORS(T, NAME)                                                               \
  struct NAME##1 {                                                                              \
    T x;                                                                                        \
  };                                                                                            \
  struct alignas(2 * sizeof(T)) NAME##2 {                                                       \
    T x, y;                                                                                     \
  };                                                                                            \
  struct NAME##3 {                                                                              \
    T x, y, z;                                                                                  \
  };                                                                                            \
  struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) NAME##4 {                             \
    T x, y, z, w;                                                                               \
  };                                                                                            \
  __forceinline__ NAME##1 make_##NAME##1(T x) { return NAME##1{x}; }                            \
  __forceinline__ NAME##2 make_##NAME##2(T x, T y) { return NAME##2{x, y}; }                    \
  __forceinline__ NAME##3 make_##NAME##3(T x, T y, T z) { return NAME##3{x, y, z}; }            \
  __forceinline__ NAME##4 make_##NAME##4(T x, T y, T z, T w) { return NAME##4{x, y, z, w}; }

EMULATOR_VECTORS(signed char, char)
EMULATOR_VECTORS(unsigned char, uchar)
EMULATOR_VECTORS(short, short)
EMULATOR_VECTORS(unsigned short, ushort)
EMULATOR_VECTORS(int, int)
EMULATOR_VECTORS(unsigned int, uint)
EMULATOR_VECTORS(long, long)
EMULATOR_VECTORS(unsigned long, ulong)
EMULATOR_VECTORS(long long, longlong)
EMULATOR_VECTORS(unsigned long long, ulonglong)
EMULATOR_VECTORS(float, float)
EMULATOR_VECTORS(double, double)

#undef EMULATOR_VECTORS

// A grid's or a block's extent; what is not given is 1.
struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return uint3{x, y, z}; }
};
