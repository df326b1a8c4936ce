// Weights that were laid out once, in panels of 16 out_features.
//
// A panel holds the weights of 16 out_features for every in_feature, one row of 16 after the other, in
// one of four formats.
#pragma once

namespace KERNELS {

constexpr int kGroup = 32;  // in_features that share a scale in the quantised formats

// Each format goes through a group in steps of `kStep` rows: `load(i)` before the rows [i, i + kStep),
// then `read(step, b)` for each of them, in order.

struct Float32 {
  static constexpr int kStep = 1;
  static constexpr int kBytesPerRow = 4 * kColumns;
  static constexpr int kBytesOfScales = 0;
  const char* rows;
  const char* row;
  void open(const char* group) { rows = group; }
  void load(int i) { row = rows + i * kBytesPerRow; }
  void read(int, Floats (&b)[kVectors]) const {
    for (int v = 0; v < kVectors; ++v) {
      b[v] = KERNELS::load(reinterpret_cast<const float*>(row) + v * kLanes);
    }
  }
};

struct BFloat16 {
  static constexpr int kStep = 1;
  static constexpr int kBytesPerRow = 2 * kColumns;
  static constexpr int kBytesOfScales = 0;
  const char* rows;
  const char* row;
  void open(const char* group) { rows = group; }
  void load(int i) { row = rows + i * kBytesPerRow; }
  void read(int, Floats (&b)[kVectors]) const {
    for (int v = 0; v < kVectors; ++v) {
      b[v] = floats_of_bfloats(KERNELS::load<Shorts>(row + 2 * v * kLanes));
    }
  }
};

// 16 halves d, then 32 rows of 16 signed bytes q: d q, which float32 holds exactly.
struct Int8 {
  static constexpr int kStep = 1;
  static constexpr int kBytesPerRow = kColumns;
  static constexpr int kBytesOfScales = 2 * kColumns;
  const char* rows;
  const char* row;
  Floats d[kVectors];
  void open(const char* group) {
    rows = group + kBytesOfScales;
    for (int v = 0; v < kVectors; ++v) {
      d[v] = floats_of_halves(KERNELS::load<Shorts>(group + 2 * v * kLanes));
    }
  }
  void load(int i) { row = rows + i * kBytesPerRow; }
  void read(int, Floats (&b)[kVectors]) const {
    Ints q[kVectors];
    read_bytes(row, q);
    for (int v = 0; v < kVectors; ++v) b[v] = d[v] * __builtin_convertvector(q[v], Floats);
  }
};

// 16 halves d, 16 halves m, then 4 rows of 16 words, each with 8 in_features q of 4 bits, the first in
// the lowest: d q + m, rounded once. What is cut out of a word in its place is 1, 16, 256 or 4096
// times q, for which there are as many d; the upper half of the word comes down once.
struct Int4 {
  static constexpr int kStep = 8;
  static constexpr int kBytesPerRow = kColumns / 2;
  static constexpr int kBytesOfScales = 4 * kColumns;
  const char* rows;
  Floats d[4][kVectors], m[kVectors];
  Bits words[kVectors];
  void open(const char* group) {
    rows = group + kBytesOfScales;
    for (int v = 0; v < kVectors; ++v) {
      d[0][v] = floats_of_halves(KERNELS::load<Shorts>(group + 2 * v * kLanes));
      m[v] = floats_of_halves(KERNELS::load<Shorts>(group + 2 * (kColumns + v * kLanes)));
      for (int i = 1; i < 4; ++i) d[i][v] = d[i - 1][v] * 0x1p-4f;
    }
  }
  void load(int i) {
    for (int v = 0; v < kVectors; ++v) {
      words[v] = KERNELS::load<Bits>(rows + i * kBytesPerRow + 4 * v * kLanes);
    }
  }
  void read(int step, Floats (&b)[kVectors]) {
    for (int v = 0; v < kVectors; ++v) {
      if (step == 4) words[v] >>= 16;
      const Ints q = (Ints)(words[v] & (15u << 4 * (step % 4)));
      b[v] = __builtin_convertvector(q, Floats) * d[step % 4][v] + m[v];
    }
  }
};

template <class Format>
constexpr std::int64_t bytes_of_group() {
  return Format::kBytesOfScales + kGroup * Format::kBytesPerRow;
}

template <class Format>
std::int64_t bytes_of_panel(std::int64_t in_features) {
  if (Format::kBytesOfScales == 0) return in_features * Format::kBytesPerRow;
  return in_features / kGroup * bytes_of_group<Format>();
}

template <class Format>
std::int64_t bytes_before(std::int64_t in_feature) {  // a multiple of kGroup
  return in_feature / kGroup * bytes_of_group<Format>();
}

// Writes the sums of a panel, [rows, 16], with its bias.
inline void write_sums(const Product& product, std::int64_t panel, std::int64_t first_row,
                       int rows, const float* sums) {
  const std::int64_t column = panel * kColumns;
  const std::int64_t left = product.out_features - column;
  const int columns = left < kColumns ? static_cast<int>(left) : kColumns;
  for (int r = 0; r < rows; ++r) {
    float* out = product.out + (first_row + r) * product.out_features + column;
    const float* sum = sums + r * kColumns;
    if (product.bias == nullptr && columns == kColumns) {
      __builtin_memcpy(out, sum, sizeof(float) * kColumns);
    } else if (product.bias == nullptr) {
      __builtin_memcpy(out, sum, sizeof(float) * columns);
    } else {
      for (int c = 0; c < columns; ++c) out[c] = sum[c] + product.bias[column + c];
    }
  }
}

// Calls work(first, end) for parts of so many panels: long enough for the memory to run ahead, and
// enough of them for the threads.
template <class Work>
void share_panels(std::int64_t panels, const Work& work) {
  const std::int64_t share = panels / (8 * pool::num_threads()) / 4 * 4;
  const std::int64_t size = share > 4 ? share : 4;
  pool::run((panels + size - 1) / size, [&](std::int64_t unit) {
    const std::int64_t end = (unit + 1) * size;
    work(unit * size, end < panels ? end : panels);
  });
}

}  // namespace KERNELS
