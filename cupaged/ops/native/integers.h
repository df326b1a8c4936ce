// Products with quantised weights in integers, which are exact whatever computes them.
//
// In a group of 32 in_features, the weights of a column are integers times a scale (plus an offset),
// and a row of x becomes integers of 22 bits and a sign times a power of two: rounded to 2^-22 of the
// largest of them, or to 2^-127 if that is more. Sums of integers times parts
// of integers are exact in 32 bits, floats are made of them group by group, in order: a result
// depends on its own row of x alone, whatever has made the sums.
#pragma once

namespace KERNELS {

constexpr int kTileRows = 16;             // of x
constexpr std::int64_t kSplitRows = 256;  // of x, that are integers at a time
constexpr int kQuads = kGroup / 4;        // in_features that integer units take at a time

// Rounded once, whatever a compiler makes of other expressions: VNNI and AMX shall agree.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

// A group of 16 rows of x: integers in parts, the lowest first, and what they are multiplied with.
// The order of in_features is the one of the format of the weights.
template <int PARTS, int BYTES>
struct Rows {
  static constexpr int kParts = PARTS, kBytes = BYTES;
  std::int8_t parts[PARTS][kTileRows][BYTES];
  float scales[kTileRows];
  float sums[kTileRows];  // of x, as rounded
};

// Digits of 8 bits with signs.
struct Bytes : Rows<3, kGroup> {
  std::int32_t zeros[kParts][kTileRows];  // what weights of 0 add to the sums
  std::int32_t quad(int part, int row, int quad) const {
    std::int32_t value;
    __builtin_memcpy(&value, parts[part][row] + 4 * quad, 4);
    return value;
  }
  template <class Format>
  void keep(int row, int at, Ints integers, __m128i order) {
    for (int part = 0; part < kParts; ++part) {
      const Ints low = integers << 24 >> 24;
      integers = (integers - low) >> 8;
      if constexpr (Format::kZero > 0) {
        const std::int32_t before = at > 0 ? zeros[part][row] : 0;
        zeros[part][row] = before + Format::kZero * _mm512_reduce_add_epi32((__m512i)low);
      }
      store(parts[part][row] + at, _mm_shuffle_epi8(_mm512_cvtepi32_epi8((__m512i)low), order));
    }
  }
  // Of the sums of weights times parts; exact but for its last rounding if they are small enough.
  static Floats combine(const Ints (&sums)[kParts]) {
    const Floats rest = __builtin_convertvector((sums[1] << 8) + sums[0], Floats);
    return multiply_add(__builtin_convertvector(sums[2], Floats), all(65536.0f), rest);
  }
};

// The weights of a group as unsigned bytes, in the order of `kOrder`: of each quad, four of column
// 0, four of column 1 and so on. A weight is `scale` times what its byte has more than kZero, plus
// `offset`. `add` adds a group to the sum of a row.
struct Int4Bytes {
  using Stored = Int4;
  static constexpr int kZero = 0;
  static constexpr int kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};

  static void expand(const char* group, Bits (&quads)[kQuads]) {
    for (int i = 0; i < kQuads / 2; ++i) {
      const Bits words = load<Bits>(group + Stored::kBytesOfScales + i * 64);
      quads[2 * i] = words & 0x0f0f0f0fu;
      quads[2 * i + 1] = words >> 4 & 0x0f0f0f0fu;
    }
  }
  static Floats scale(const char* group) { return floats_of_halves(load<Shorts>(group)); }
  static Floats offset(const char* group) {
    return floats_of_halves(load<Shorts>(group + 2 * kColumns));
  }
  template <class Parts>
  static Floats add(Floats sum, const Ints (&sums)[Parts::kParts], Floats scale, Floats offset,
                    const Parts& x, int row) {
    const Floats product = Parts::combine(sums) * x.scales[row];
    return multiply_add(offset, all(x.sums[row]), multiply_add(scale, product, sum));
  }
};

struct Int8Bytes {
  using Stored = Int8;
  static constexpr int kZero = 128;
  static constexpr int kOrder[8] = {0, 1, 2, 3, 4, 5, 6, 7};

  static void expand(const char* group, Bits (&quads)[kQuads]) {
    // Four rows of 16 bytes become 16 columns of four: by words first, then within them.
    const __m512i words = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    for (int i = 0; i < kQuads; ++i) {
      const __m512i rows = _mm512_loadu_si512(group + Stored::kBytesOfScales + i * 64);
      const __m512i mixed = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(words, rows), bytes);
      quads[i] = (Bits)mixed ^ 0x80808080u;
    }
  }
  static Floats scale(const char* group) { return floats_of_halves(load<Shorts>(group)); }
  static Floats offset(const char*) { return Floats{}; }
  static Floats add(Floats sum, const Ints (&sums)[Bytes::kParts], Floats scale, Floats,
                    const Bytes& x, int row) {
    Ints exact[Bytes::kParts];
    for (int part = 0; part < Bytes::kParts; ++part) exact[part] = sums[part] - x.zeros[part][row];
    return multiply_add(scale, Bytes::combine(exact) * x.scales[row], sum);
  }
};

// A tile of 16 rows of x: its groups.
template <class Format, class Parts>
void split(const Product& product, std::int64_t tile, Parts* groups) {
  alignas(16) constexpr char kShuffle[16] = {
      Format::kOrder[0],     Format::kOrder[1],     Format::kOrder[2],     Format::kOrder[3],
      Format::kOrder[4],     Format::kOrder[5],     Format::kOrder[6],     Format::kOrder[7],
      Format::kOrder[0] + 8, Format::kOrder[1] + 8, Format::kOrder[2] + 8, Format::kOrder[3] + 8,
      Format::kOrder[4] + 8, Format::kOrder[5] + 8, Format::kOrder[6] + 8, Format::kOrder[7] + 8};
  const __m128i order = _mm_load_si128(reinterpret_cast<const __m128i*>(kShuffle));
  const std::int64_t left = product.rows - tile * kTileRows;
  const int rows = left < kTileRows ? static_cast<int>(left) : kTileRows;
  for (int row = 0; row < rows; ++row) {
    const float* from = product.x + (tile * kTileRows + row) * product.in_features;
    Parts* out = groups;
    for (std::int64_t i = 0; i < product.in_features; i += kGroup, ++out) {
      const Floats x[2] = {load(from + i), load(from + i + kLanes)};
      const Bits first = (Bits)x[0] & 0x7fffffffu, second = (Bits)x[1] & 0x7fffffffu;
      const Bits magnitude = first > second ? first : second;
      const std::uint32_t largest = _mm512_reduce_max_epu32((__m512i)magnitude);
      // Its exponent, such that |x| < 2^(exponent - 126), makes integers of up to 2^22.
      const std::uint32_t exponent = largest >> 23, kept = exponent < 22 ? 22 : exponent;
      const Floats up = (Floats)(Bits{} + ((275 - kept) << 23));
      Ints totals = {};
      for (int half = 0; half < 2; ++half) {
        Ints integers = (Ints)(x[half] * up + 0x1.8p23f) - 0x4b400000;  // rounded
        if (exponent == 255) integers = Ints{};
        totals += integers;
        out->template keep<Format>(row, half * kLanes, integers, order);
      }
      const float scale = ((Floats)(Bits{} + ((kept - 21) << 23)))[0];
      // Infinities and NaN have no such integers: all that they meet is NaN.
      out->scales[row] = exponent == 255 ? __builtin_nanf("") : scale;
      const auto total = static_cast<float>(_mm512_reduce_add_epi32((__m512i)totals));
      out->sums[row] = total * out->scales[row];
    }
  }
}

// Calls multiply(part, x, tiles) for a few hundred rows after the other; x: [tiles, groups].
template <class Format, class Parts, class Multiply>
void multiply_split(const Product& product, const Multiply& multiply) {
  const std::int64_t groups = product.in_features / kGroup;
  for (std::int64_t row = 0; row < product.rows; row += kSplitRows) {
    Product part = product;
    part.x += row * product.in_features;
    part.out += row * product.out_features;
    part.rows = product.rows - row < kSplitRows ? product.rows - row : kSplitRows;
    const std::int64_t tiles = (part.rows + kTileRows - 1) / kTileRows;
    float* memory = pool::shared_scratch(tiles * groups * (sizeof(Parts) / 4));
    Parts* x = reinterpret_cast<Parts*>(memory);
    pool::run(tiles, [&](std::int64_t tile) { split<Format>(part, tile, x + tile * groups); });
    multiply(part, x, tiles);
  }
}

}  // namespace KERNELS
