// Products with weights that were laid out once, in panels of 16 out_features.
//
// A panel holds the weights of 16 out_features for every in_feature, one row of 16 after the other, in
// one of four formats. Every element of a product is the sum over in_features in their order, each
// term added by one fused multiply-add where the processor has one: it does not depend on how many
// rows are multiplied at once, nor on the threads, nor, for equal weights, on the format.
#pragma once

namespace KERNELS {

constexpr int kGroup = 32;         // in_features that share a scale in the quantised formats
constexpr int kTile = 256;         // in_features that are expanded at a time
constexpr int kRowsAtOnce = 128;   // of x, that pass over a tile while it is in the nearest cache

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

// sums[p][r][c] += x[r][i] * weight[p][i][c] for `ROWS` rows of x and the columns of `PANELS` panels,
// whose sums lie `sums_stride` floats apart.
template <class Format, int ROWS, int PANELS>
void multiply(const char* panel, std::int64_t panel_stride, const float* x, std::int64_t x_stride,
              int in_features, float* sums, std::int64_t sums_stride) {
  Floats sum[ROWS][PANELS][kVectors];
  for (int r = 0; r < ROWS; ++r) {
    for (int p = 0; p < PANELS; ++p) {
      for (int v = 0; v < kVectors; ++v) {
        sum[r][p][v] = load(sums + p * sums_stride + r * kColumns + v * kLanes);
      }
    }
  }
  for (; in_features > 0; in_features -= kGroup) {
    Format group[PANELS];
    for (int p = 0; p < PANELS; ++p) group[p].open(panel + p * panel_stride);
    const int count = in_features < kGroup ? in_features : kGroup;
    for (int i = 0; i < count; i += Format::kStep) {
      for (int p = 0; p < PANELS; ++p) group[p].load(i);
#pragma GCC unroll 8
      for (int step = 0; step < Format::kStep; ++step) {
        Floats b[PANELS][kVectors];
        for (int p = 0; p < PANELS; ++p) group[p].read(step, b[p]);
        for (int r = 0; r < ROWS; ++r) {
          const float factor = x[r * x_stride + i + step];
          for (int p = 0; p < PANELS; ++p) {
            for (int v = 0; v < kVectors; ++v) sum[r][p][v] += factor * b[p][v];
          }
        }
      }
    }
    panel += bytes_of_group<Format>();
    x += kGroup;
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int p = 0; p < PANELS; ++p) {
      for (int v = 0; v < kVectors; ++v) {
        store(sums + p * sums_stride + r * kColumns + v * kLanes, sum[r][p][v]);
      }
    }
  }
}

// Panels that are multiplied at once by so many rows: several, so that additions need not wait for
// each other, if sums, scales and weights then have registers.
template <class Format>
constexpr int panels_at_once(int rows) {
  const int num_scales = Format::kStep == 8 ? 5 : Format::kBytesOfScales > 0 ? 1 : 0;
  const bool keeps_weights = rows > 1 || num_scales > 0;  // a single use reads them from memory
  for (int panels = 4; panels > 1; panels /= 2) {
    const int per_column = rows + num_scales + (keeps_weights ? 1 : 0);
    if (panels * kVectors * per_column + 2 <= kRegisters) return panels;
  }
  return 1;
}

// multiply<Format, rows, panels_at_once(rows) or 1>, for a number of rows known only now.
template <class Format, bool ONE_PANEL, int ROWS = kMostRows>
void multiply_rows(int rows, const char* panel, std::int64_t panel_stride, const float* x,
                   std::int64_t x_stride, int in_features, float* sums, std::int64_t sums_stride) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) {
      constexpr int kPanels = ONE_PANEL ? 1 : panels_at_once<Format>(ROWS);
      multiply<Format, ROWS, kPanels>(panel, panel_stride, x, x_stride, in_features, sums,
                                      sums_stride);
    } else {
      multiply_rows<Format, ONE_PANEL, ROWS - 1>(rows, panel, panel_stride, x, x_stride,
                                                 in_features, sums, sums_stride);
    }
  }
}

// Rows [0, in_features) of a panel as floats.
template <class Format>
void expand(const char* panel, int in_features, float* out) {
  for (; in_features > 0; in_features -= kGroup) {
    Format group;
    group.open(panel);
    const int count = in_features < kGroup ? in_features : kGroup;
    for (int i = 0; i < count; i += Format::kStep) {
      group.load(i);
#pragma GCC unroll 8
      for (int step = 0; step < Format::kStep; ++step) {
        Floats b[kVectors];
        group.read(step, b);
        for (int v = 0; v < kVectors; ++v) {
          store(out + (i + step) * kColumns + v * kLanes, b[v]);
        }
      }
    }
    panel += bytes_of_group<Format>();
    out += kGroup * kColumns;
  }
}

inline void write_sums(const Product& product, std::int64_t panel, std::int64_t first_row,
                       int rows, const float* sums) {
  const std::int64_t column = panel * kColumns;
  const std::int64_t left = product.out_features - column;
  const int columns = left < kColumns ? static_cast<int>(left) : kColumns;
  for (int r = 0; r < rows; ++r) {
    float* out = product.out + (first_row + r) * product.out_features + column;
    const float* sum = sums + r * kColumns;
    if (product.bias == nullptr) {
      __builtin_memcpy(out, sum, sizeof(float) * columns);
    } else {
      for (int c = 0; c < columns; ++c) out[c] = sum[c] + product.bias[column + c];
    }
  }
}

// Few rows: each weight is read once and used at once.
template <class Format>
void multiply_few(const Product& product, std::int64_t first_panel, std::int64_t end_panel) {
  const int rows = static_cast<int>(product.rows);
  const std::int64_t stride = bytes_of_panel<Format>(product.in_features);
  const int most = panels_at_once<Format>(rows);
  float sums[4 * kMostRows * kColumns];
  for (std::int64_t panel = first_panel; panel < end_panel;) {
    const int panels = end_panel - panel >= most ? most : 1;
    const std::int64_t sums_stride = rows * kColumns;
    __builtin_memset(sums, 0, sizeof(float) * panels * sums_stride);
    const char* weights = product.packed + panel * stride;
    const int in_features = static_cast<int>(product.in_features);
    if (panels > 1) {
      multiply_rows<Format, false>(rows, weights, stride, product.x, product.in_features,
                                   in_features, sums, sums_stride);
    } else {
      multiply_rows<Format, true>(rows, weights, stride, product.x, product.in_features,
                                  in_features, sums, sums_stride);
    }
    for (int p = 0; p < panels; ++p) {
      write_sums(product, panel + p, 0, rows, sums + p * sums_stride);
    }
    panel += panels;
  }
}

// Many rows: a tile of a panel is expanded once for all of them.
template <class Format>
void multiply_many(const Product& product, std::int64_t first_row, std::int64_t panel) {
  const std::int64_t left = product.rows - first_row;
  const int rows = left < kRowsAtOnce ? static_cast<int>(left) : kRowsAtOnce;
  float* sums = pool::scratch((kRowsAtOnce + kTile) * kColumns);
  float* tile = sums + kRowsAtOnce * kColumns;
  __builtin_memset(sums, 0, sizeof(float) * rows * kColumns);
  const char* weights = product.packed + panel * bytes_of_panel<Format>(product.in_features);
  const int parts = (rows + kMostRows - 1) / kMostRows;
  for (std::int64_t i = 0; i < product.in_features; i += kTile) {
    const std::int64_t rest = product.in_features - i;
    const int in_features = rest < kTile ? static_cast<int>(rest) : kTile;
    const char* floats = weights + bytes_before<Format>(i);
    if (bytes_of_group<Format>() != bytes_of_group<Float32>()) {
      expand<Format>(floats, in_features, tile);
      floats = reinterpret_cast<const char*>(tile);
    }
    for (int part = 0; part < parts; ++part) {  // of equal sizes, or smaller by one
      const int begin = rows * part / parts, end = rows * (part + 1) / parts;
      const float* x = product.x + (first_row + begin) * product.in_features + i;
      multiply_rows<Float32, true>(end - begin, floats, 0, x, product.in_features, in_features,
                                   sums + begin * kColumns, 0);
    }
  }
  write_sums(product, panel, first_row, rows, sums);
}

template <class Format>
void multiply_all(const Product& product) {
  const std::int64_t panels = (product.out_features + kColumns - 1) / kColumns;
  if (product.rows <= kMostRows) {
    // Long enough for the memory to run ahead, and enough of them for the threads.
    const std::int64_t share = panels / (8 * pool::num_threads()) / 4 * 4;
    const std::int64_t size = share > 4 ? share : 4;
    pool::run((panels + size - 1) / size, [&](std::int64_t unit) {
      const std::int64_t end = (unit + 1) * size;
      multiply_few<Format>(product, unit * size, end < panels ? end : panels);
    });
    return;
  }
  const std::int64_t blocks = (product.rows + kRowsAtOnce - 1) / kRowsAtOnce;
  pool::run(blocks * panels, [&](std::int64_t unit) {
    multiply_many<Format>(product, unit / panels * kRowsAtOnce, unit % panels);
  });
}

void multiply_all(const Product& product) {
  switch (product.format) {
    case Format::float32: return multiply_all<Float32>(product);
    case Format::bfloat16: return multiply_all<BFloat16>(product);
    case Format::int8: return multiply_all<Int8>(product);
    case Format::int4: return multiply_all<Int4>(product);
  }
}

// Rows of weights: out[t] = weight[ids[t]].
template <class Stored>
void gather(const Product& product, const std::int32_t* ids) {
  const std::int64_t stride = bytes_of_panel<Stored>(product.in_features);
  pool::run(product.rows, [&](std::int64_t t) {
    const char* panel = product.packed + ids[t] / kColumns * stride;
    float* out = product.out + t * product.in_features;
    float group[kGroup * kColumns];
    for (std::int64_t i = 0; i < product.in_features; i += kGroup) {
      const std::int64_t rest = product.in_features - i;
      const int count = rest < kGroup ? static_cast<int>(rest) : kGroup;
      expand<Stored>(panel + bytes_before<Stored>(i), count, group);
      for (int k = 0; k < count; ++k) out[i + k] = group[k * kColumns + ids[t] % kColumns];
    }
  });
}

void gather(const Product& product, const std::int32_t* ids) {
  switch (product.format) {
    case Format::float32: return gather<Float32>(product, ids);
    case Format::bfloat16: return gather<BFloat16>(product, ids);
    case Format::int8: return gather<Int8>(product, ids);
    case Format::int4: return gather<Int4>(product, ids);
  }
}

}  // namespace KERNELS
