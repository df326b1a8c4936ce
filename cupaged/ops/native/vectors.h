// Vectors of LANES floats, by the compiler's vector extensions: the same code on every processor.
//
// No part of the standard library with templates may be used here or in the other headers of
// kernels: each of these is compiled several times, for processors of different abilities, and what
// the linker takes for one function must not be compiled for a processor that is not there.
#pragma once

namespace KERNELS {

constexpr int kLanes = LANES;
constexpr int kColumns = 16;                    // out_features of a panel of weights
constexpr int kVectors = kColumns / kLanes;     // that hold a row of a panel

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef std::int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef std::uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef std::uint16_t Shorts __attribute__((vector_size(2 * LANES)));

template <class Vector, class T>
inline Vector load(const T* from) {
  Vector vector;
  __builtin_memcpy(&vector, from, sizeof vector);
  return vector;
}

template <class Vector, class T>
inline void store(T* to, Vector vector) {
  __builtin_memcpy(to, &vector, sizeof vector);
}

inline Floats load(const float* from) { return load<Floats>(from); }

inline Floats all(float value) { return Floats{} + value; }

inline float sum(Floats vector) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) vector[i] += vector[i + half];
  }
  return vector[0];
}

inline Floats floats_of_halves(Shorts halves) {
  // Exponents differ by 112, except the one of infinities and NaN, which has all bits in both.
  const Bits bits = __builtin_convertvector(halves, Bits);
  const Floats magnitude = (Floats)((bits & 0x7fffu) << 13) * 0x1p112f;
  const Bits special = (Bits)((bits & 0x7c00u) == 0x7c00u) & 0x7f800000u;
  return (Floats)((Bits)magnitude | special | (bits & 0x8000u) << 16);
}

inline Floats floats_of_bfloats(Shorts bfloats) {
  return (Floats)(__builtin_convertvector(bfloats, Bits) << 16);
}

// The 16 signed bytes of a row, as integers.
inline void read_bytes(const char* row, Ints (&out)[kVectors]) {
#if LANES > 4  // x86: compilers see no single instruction in what is below
  for (int v = 0; v < kVectors; ++v) {
#if LANES == 16
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row));
    out[v] = (Ints)_mm512_cvtepi8_epi32(bytes);
#else
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + 8 * v));
    out[v] = (Ints)_mm256_cvtepi8_epi32(bytes);
#endif
  }
#else
  typedef std::int8_t Narrow __attribute__((vector_size(16)));
  typedef std::int32_t Wide __attribute__((vector_size(64)));
  const Wide wide = __builtin_convertvector(load<Narrow>(row), Wide);
  __builtin_memcpy(out, &wide, sizeof wide);
#endif
}

// e^x to about one unit in the last place: 0 instead of what has no full precision, infinity where it
// is right, NaN for NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2, ln 2 in two parts (Cody and Waite, 1980); e^r by a polynomial
// with the coefficients of Cephes' expf (S. Moshier).
inline Floats exponential(Floats given) {
  Floats x = given < -88.0f ? all(-88.0f) : given;
  x = x > 89.0f ? all(89.0f) : x;
  const Floats shift = all(0x1.8p23f);  // adding it rounds to an integer
  const Floats shifted = x * 1.44269504088896341f + shift;
  const Floats n = shifted - shift;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // 2^n in two factors, since n may leave the range of exponents by itself.
  const Ints exponent = (Ints)shifted - 0x4b400000;
  const Ints half = exponent >> 1;
  const Floats low = (Floats)((half + 127) << 23);
  const Floats high = (Floats)((exponent - half + 127) << 23);
  return given < -87.3f ? Floats{} : p * low * high;
}

}  // namespace KERNELS
