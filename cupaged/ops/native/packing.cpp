#include "packing.h"

#include <cmath>
#include <cstring>

namespace {

constexpr std::int64_t kColumns = 16, kGroup = 32;

std::uint16_t half_of(float value) {  // to the nearest, ties to even
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  const float magnitude = std::fabs(value);
  if (!(magnitude < 65520.0f)) {
    return static_cast<std::uint16_t>(sign | (std::isnan(value) ? 0x7e00u : 0x7c00u));
  }
  if (magnitude < 0x1p-14f) {
    return static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(
                                                 std::nearbyint(magnitude * 0x1p24f)));
  }
  bits &= 0x7fffffffu;
  bits += 0xfffu + (bits >> 13 & 1u);
  return static_cast<std::uint16_t>(sign | ((bits >> 13) - (112u << 10)));
}

float float_of(std::uint16_t half) {
  const std::uint32_t bits = (half & 0x7fffu) << 13;
  float magnitude;
  std::memcpy(&magnitude, &bits, 4);
  magnitude *= 0x1p112f;
  return half & 0x8000u ? -magnitude : magnitude;
}

template <class T>
T read(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

std::uint16_t bfloat_of(float value) {
  const auto bits = read<std::uint32_t>(reinterpret_cast<const char*>(&value));
  if (std::isnan(value)) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// One row of 32 numbers into its column of a group: `group` points at the group's first byte.

void pack_q8_0(char* group, std::int64_t column, const char* block) {
  std::memcpy(group + 2 * column, block, 2);
  char* rows = group + 2 * kColumns + column;
  for (std::int64_t i = 0; i < kGroup; ++i) rows[i * kColumns] = block[2 + i];
}

void quantise(char* group, std::int64_t column, const char* floats) {
  float largest = 0.0f;
  for (std::int64_t i = 0; i < kGroup; ++i) {
    largest = std::fmax(largest, std::fabs(read<float>(floats + 4 * i)));
  }
  const float step = largest / 127.0f;
  const float inverse = step != 0.0f ? 1.0f / step : 0.0f;
  char block[2 + kGroup];
  const std::uint16_t half = half_of(step);
  std::memcpy(block, &half, 2);
  for (std::int64_t i = 0; i < kGroup; ++i) {
    const float scaled = read<float>(floats + 4 * i) * inverse;
    block[2 + i] = static_cast<char>(std::isfinite(scaled) ? std::lround(scaled) : 0);
  }
  pack_q8_0(group, column, block);
}

void pack_nibbles(char* group, std::int64_t column, std::uint16_t d, std::uint16_t m,
                  const char* nibbles) {
  std::memcpy(group + 2 * column, &d, 2);
  std::memcpy(group + 2 * (kColumns + column), &m, 2);
  for (std::int64_t row = 0; row < kGroup / 8; ++row) {
    std::uint32_t word = 0;
    for (std::int64_t i = 0; i < 8; ++i) {
      const std::int64_t k = 8 * row + i;
      const auto both = static_cast<unsigned char>(nibbles[k % 16]);
      word |= (k < 16 ? both & 15u : both >> 4) << 4 * i;
    }
    std::memcpy(group + 4 * (kColumns + row * kColumns + column), &word, 4);
  }
}

void pack_row(char* panel, std::int64_t column, Format format, const char* row, Stored stored,
              std::int64_t in_features) {
  if (format == Format::float32) {
    for (std::int64_t i = 0; i < in_features; ++i) {
      std::memcpy(panel + 4 * (i * kColumns + column), row + 4 * i, 4);
    }
    return;
  }
  if (format == Format::bfloat16) {
    for (std::int64_t i = 0; i < in_features; ++i) {
      const std::uint16_t value = stored == Stored::bfloat16 ? read<std::uint16_t>(row + 2 * i)
                                                             : bfloat_of(read<float>(row + 4 * i));
      std::memcpy(panel + 2 * (i * kColumns + column), &value, 2);
    }
    return;
  }
  const std::int64_t group_bytes = packed_bytes(format, kColumns, kGroup);
  const std::int64_t block_bytes = bytes_per_row(stored, kGroup);
  for (std::int64_t i = 0; i < in_features / kGroup; ++i) {
    char* group = panel + i * group_bytes;
    const char* block = row + i * block_bytes;
    switch (stored) {
      case Stored::float32: quantise(group, column, block); break;
      case Stored::bfloat16: break;  // see can_pack
      case Stored::q8_0: pack_q8_0(group, column, block); break;
      case Stored::q4_0: {  // d (q - 8) = d q + m
        const auto d = read<std::uint16_t>(block);
        pack_nibbles(group, column, d, half_of(-8.0f * float_of(d)), block + 2);
        break;
      }
      case Stored::q4_1:
        pack_nibbles(group, column, read<std::uint16_t>(block), read<std::uint16_t>(block + 2),
                     block + 4);
        break;
    }
  }
}

}  // namespace

bool can_pack(Stored stored, Format format) {
  switch (format) {
    case Format::float32: return stored == Stored::float32;
    case Format::bfloat16: return stored == Stored::float32 || stored == Stored::bfloat16;
    case Format::int8: return stored == Stored::float32 || stored == Stored::q8_0;
    case Format::int4: return stored == Stored::q4_0 || stored == Stored::q4_1;
  }
  return false;
}

std::int64_t bytes_per_row(Stored stored, std::int64_t in_features) {
  switch (stored) {
    case Stored::float32: return 4 * in_features;
    case Stored::bfloat16: return 2 * in_features;
    case Stored::q8_0: return in_features / kGroup * 34;
    case Stored::q4_0: return in_features / kGroup * 18;
    case Stored::q4_1: return in_features / kGroup * 20;
  }
  return 0;
}

std::int64_t packed_bytes(Format format, std::int64_t out_features, std::int64_t in_features) {
  const std::int64_t columns = (out_features + kColumns - 1) / kColumns * kColumns;
  switch (format) {
    case Format::float32: return columns * in_features * 4;
    case Format::bfloat16: return columns * in_features * 2;
    case Format::int8: return columns * (in_features / kGroup) * 34;
    case Format::int4: return columns * (in_features / kGroup) * 20;
  }
  return 0;
}

void pack(char* packed, Format format, const char* rows, Stored stored, std::int64_t out_features,
          std::int64_t in_features) {
  const std::int64_t panel_bytes = packed_bytes(format, kColumns, in_features);
  const std::int64_t row_bytes = bytes_per_row(stored, in_features);
  pool::run((out_features + kColumns - 1) / kColumns, [&](std::int64_t panel) {
    char* to = packed + panel * panel_bytes;
    std::memset(to, 0, panel_bytes);
    for (std::int64_t column = 0; column < kColumns; ++column) {
      const std::int64_t row = panel * kColumns + column;
      if (row < out_features) {
        pack_row(to, column, format, rows + row * row_bytes, stored, in_features);
      }
    }
  });
}
