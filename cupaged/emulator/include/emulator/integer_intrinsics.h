// Integer intrinsics: counting bits, byte permutes, funnel shifts, high halves of products,
// averages, and the dot products __dp4a and __dp2a. SIMD within a word is in simd_intrinsics.h.
#pragma once

// --- counting and moving bits ---

__forceinline__ int __popc(unsigned int x) { return __builtin_popcount(x); }
__forceinline__ int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
__forceinline__ int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
__forceinline__ int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
__forceinline__ int __ffs(int x) { return __builtin_ffs(x); }
__forceinline__ int __ffsll(long long x) { return __builtin_ffsll(x); }

inline unsigned int __brev(unsigned int x) {
  x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
  x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
  x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
  return __builtin_bswap32(x);
}
inline unsigned long long __brevll(unsigned long long x) {
  return static_cast<unsigned long long>(__brev(static_cast<unsigned>(x))) << 32 |
         __brev(static_cast<unsigned>(x >> 32));
}

// Bit number n of mask, counted from `base` upwards (offset > 0) or downwards (< 0); -1 if none.
inline unsigned int __fns(unsigned int mask, unsigned int base, int offset) {
  if (base >= 32) return ~0u;
  if (offset == 0) return (mask >> base & 1) != 0 ? base : ~0u;
  int left = offset > 0 ? offset : -offset;
  const int step = offset > 0 ? 1 : -1;
  for (int bit = static_cast<int>(base); bit >= 0 && bit < 32; bit += step) {
    if ((mask >> bit & 1) != 0 && --left == 0) return static_cast<unsigned>(bit);
  }
  return ~0u;
}

// Byte i of the result is byte (selector >> 4 i) & 7 of y:x.
inline unsigned int __byte_perm(unsigned int x, unsigned int y, unsigned int selector) {
  const unsigned long long both = static_cast<unsigned long long>(y) << 32 | x;
  unsigned int result = 0;
  for (int byte = 0; byte < 4; ++byte) {
    const unsigned int from = selector >> (4 * byte) & 7;
    result |= static_cast<unsigned int>(both >> (8 * from) & 0xff) << (8 * byte);
  }
  return result;
}

// The high (left) or low (right) word of high:low, shifted by shift & 31, or by at most 32 (c).
__forceinline__ unsigned int __funnelshift_lc(unsigned int low, unsigned int high,
                                              unsigned int shift) {
  const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
  return static_cast<unsigned int>(both << (shift < 32 ? shift : 32) >> 32);
}
__forceinline__ unsigned int __funnelshift_rc(unsigned int low, unsigned int high,
                                              unsigned int shift) {
  const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
  return static_cast<unsigned int>(both >> (shift < 32 ? shift : 32));
}
__forceinline__ unsigned int __funnelshift_l(unsigned int low, unsigned int high,
                                             unsigned int shift) {
  return __funnelshift_lc(low, high, shift & 31);
}
__forceinline__ unsigned int __funnelshift_r(unsigned int low, unsigned int high,
                                             unsigned int shift) {
  return __funnelshift_rc(low, high, shift & 31);
}

// --- products ---

__forceinline__ int __mulhi(int a, int b) {
  return static_cast<int>(static_cast<long long>(a) * b >> 32);
}
__forceinline__ unsigned int __umulhi(unsigned int a, unsigned int b) {
  return static_cast<unsigned int>(static_cast<unsigned long long>(a) * b >> 32);
}
__forceinline__ long long __mul64hi(long long a, long long b) {
  return static_cast<long long>(static_cast<__int128>(a) * b >> 64);
}
__forceinline__ unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
// The low 32 bits of the product of the low 24 bits.
__forceinline__ int __mul24(int a, int b) {
  const long long left = static_cast<int>(static_cast<unsigned>(a) << 8) >> 8;
  const long long right = static_cast<int>(static_cast<unsigned>(b) << 8) >> 8;
  return static_cast<int>(left * right);
}
__forceinline__ unsigned int __umul24(unsigned int a, unsigned int b) {
  return (a & 0xffffff) * (b & 0xffffff);
}
__forceinline__ int mul24(int a, int b) { return __mul24(a, b); }
__forceinline__ unsigned int umul24(unsigned int a, unsigned int b) { return __umul24(a, b); }

// --- averages and sums of differences ---

__forceinline__ int __hadd(int a, int b) {
  return static_cast<int>((static_cast<long long>(a) + b) >> 1);
}
__forceinline__ int __rhadd(int a, int b) {
  return static_cast<int>((static_cast<long long>(a) + b + 1) >> 1);
}
__forceinline__ unsigned int __uhadd(unsigned int a, unsigned int b) {
  return static_cast<unsigned int>((static_cast<unsigned long long>(a) + b) >> 1);
}
__forceinline__ unsigned int __urhadd(unsigned int a, unsigned int b) {
  return static_cast<unsigned int>((static_cast<unsigned long long>(a) + b + 1) >> 1);
}
// |a - b| + c
__forceinline__ unsigned int __sad(int a, int b, unsigned int c) {
  const unsigned int left = static_cast<unsigned>(a), right = static_cast<unsigned>(b);
  return (a < b ? right - left : left - right) + c;
}
__forceinline__ unsigned int __usad(unsigned int a, unsigned int b, unsigned int c) {
  return (a < b ? b - a : a - b) + c;
}

// --- dot products ---

namespace emulator {

// Element `index` of a word seen as elements of type T.
template <class T>
__forceinline__ T element_of(unsigned int word, int index) {
  return static_cast<T>(word >> (index * 8 * static_cast<int>(sizeof(T))));
}

// Sums wrap around, as the device's do.
template <class Wide, class Narrow, class Sum>
__forceinline__ Sum dot(unsigned int a, unsigned int b, Sum c, int num, int b_first) {
  unsigned int sum = static_cast<unsigned int>(c);
  for (int i = 0; i < num; ++i) {
    const auto product = Sum(element_of<Wide>(a, i)) * Sum(element_of<Narrow>(b, b_first + i));
    sum += static_cast<unsigned int>(product);
  }
  return static_cast<Sum>(sum);
}

}  // namespace emulator

__forceinline__ int __dp4a(int a, int b, int c) {
  return emulator::dot<signed char, signed char>(unsigned(a), unsigned(b), c, 4, 0);
}
__forceinline__ unsigned int __dp4a(unsigned int a, unsigned int b, unsigned int c) {
  return emulator::dot<unsigned char, unsigned char>(a, b, c, 4, 0);
}
__forceinline__ int __dp4a(char4 a, char4 b, int c) {
  return __dp4a(emulator::bits_as<int>(a), emulator::bits_as<int>(b), c);
}
__forceinline__ unsigned int __dp4a(uchar4 a, uchar4 b, unsigned int c) {
  return __dp4a(emulator::bits_as<unsigned>(a), emulator::bits_as<unsigned>(b), c);
}

// Two 16-bit elements of a by the low (lo) or high (hi) two bytes of b.
#define EMULATOR_DP2A(NAME, FIRST)                                                              \
  __forceinline__ int NAME(int a, int b, int c) {                                               \
    return emulator::dot<short, signed char>(unsigned(a), unsigned(b), c, 2, FIRST);            \
  }                                                                                             \
  __forceinline__ unsigned int NAME(unsigned int a, unsigned int b, unsigned int c) {           \
    return emulator::dot<unsigned short, unsigned char>(a, b, c, 2, FIRST);                     \
  }                                                                                             \
  __forceinline__ int NAME(short2 a, char4 b, int c) {                                          \
    return NAME(emulator::bits_as<int>(a), emulator::bits_as<int>(b), c);                       \
  }                                                                                             \
  __forceinline__ unsigned int NAME(ushort2 a, uchar4 b, unsigned int c) {                      \
    return NAME(emulator::bits_as<unsigned>(a), emulator::bits_as<unsigned>(b), c);             \
  }
EMULATOR_DP2A(__dp2a_lo, 0)
EMULATOR_DP2A(__dp2a_hi, 2)
#undef EMULATOR_DP2A
