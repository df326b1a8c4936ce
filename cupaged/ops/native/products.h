// Products with weights that were laid out in panels; see formats.h.
//
// Every element of a product is the sum over in_features in their order, each term added by one fused
// multiply-add where the processor has one: it does not depend on how many rows are multiplied at
// once, nor on the threads, nor, for equal weights, on the format.
#pragma once

namespace KERNELS {

constexpr int kTilePanels = kVectors == 1 ? 2 : 1;  // that are multiplied with many rows at once
constexpr int kRowsAtOnce = 256;  // of x, that pass over a tile of those
// In_features of a tile: for many rows as much as the second cache feeds, so that their sums are
// seldom carried over; for fewer what the nearest one holds.
constexpr int kTile = 1024 / kTilePanels, kNearTile = kTile / 4;

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

// multiply<Format, rows, PANELS>, or panels_at_once(rows) of them for PANELS = 0, for a number of rows
// known only now.
template <class Format, int PANELS, int ROWS = kMostRows>
void multiply_rows(int rows, const char* panel, std::int64_t panel_stride, const float* x,
                   std::int64_t x_stride, int in_features, float* sums, std::int64_t sums_stride) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) {
      constexpr int kPanels = PANELS > 0 ? PANELS : panels_at_once<Format>(ROWS);
      multiply<Format, ROWS, kPanels>(panel, panel_stride, x, x_stride, in_features, sums,
                                      sums_stride);
    } else {
      multiply_rows<Format, PANELS, ROWS - 1>(rows, panel, panel_stride, x, x_stride, in_features,
                                              sums, sums_stride);
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
      multiply_rows<Format, 0>(rows, weights, stride, product.x, product.in_features,
                                   in_features, sums, sums_stride);
    } else {
      multiply_rows<Format, 1>(rows, weights, stride, product.x, product.in_features,
                                  in_features, sums, sums_stride);
    }
    for (int p = 0; p < panels; ++p) {
      write_sums(product, panel + p, 0, rows, sums + p * sums_stride);
    }
    panel += panels;
  }
}

// Many rows: a tile of PANELS panels is expanded once for all of them.
template <class Format, int PANELS>
void multiply_tiles(const Product& product, std::int64_t first_row, std::int64_t panel) {
  const std::int64_t left = product.rows - first_row;
  const int rows = left < kRowsAtOnce ? static_cast<int>(left) : kRowsAtOnce;
  float* sums = pool::scratch(PANELS * (kRowsAtOnce + kTile) * kColumns);
  float* tile = sums + PANELS * kRowsAtOnce * kColumns;
  const std::int64_t sums_stride = rows * kColumns;
  __builtin_memset(sums, 0, sizeof(float) * PANELS * sums_stride);
  constexpr bool kExpands = bytes_of_group<Format>() != bytes_of_group<Float32>();
  const std::int64_t panel_stride = bytes_of_panel<Format>(product.in_features);
  const std::int64_t stride = kExpands ? kTile * kColumns * sizeof(float) : panel_stride;
  const char* weights = product.packed + panel * panel_stride;
  const int parts = (rows + kMostRows - 1) / kMostRows;
  const int size = rows > kRowsAtOnce / 2 ? kTile : kNearTile;
  for (std::int64_t i = 0; i < product.in_features; i += size) {
    const std::int64_t rest = product.in_features - i;
    const int in_features = rest < size ? static_cast<int>(rest) : size;
    const char* floats = weights + bytes_before<Format>(i);
    if (kExpands) {
      for (int p = 0; p < PANELS; ++p) {
        expand<Format>(floats + p * panel_stride, in_features, tile + p * kTile * kColumns);
      }
      floats = reinterpret_cast<const char*>(tile);
    }
    for (int part = 0; part < parts; ++part) {  // of equal sizes, or smaller by one
      const int begin = rows * part / parts, end = rows * (part + 1) / parts;
      const float* x = product.x + (first_row + begin) * product.in_features + i;
      multiply_rows<Float32, PANELS>(end - begin, floats, stride, x, product.in_features,
                                     in_features, sums + begin * kColumns, sums_stride);
    }
  }
  for (int p = 0; p < PANELS; ++p) {
    write_sums(product, panel + p, first_row, rows, sums + p * sums_stride);
  }
}

template <class Format>
void multiply_all(const Product& product) {
  const std::int64_t panels = (product.out_features + kColumns - 1) / kColumns;
  if (product.rows <= kMostRows) {
    share_panels(panels, [&](std::int64_t first, std::int64_t end) {
      multiply_few<Format>(product, first, end);
    });
    return;
  }
  const std::int64_t blocks = (product.rows + kRowsAtOnce - 1) / kRowsAtOnce;
  const std::int64_t tiles = (panels + kTilePanels - 1) / kTilePanels;
  pool::run(blocks * tiles, [&](std::int64_t unit) {
    const std::int64_t first_row = unit / tiles * kRowsAtOnce, panel = unit % tiles * kTilePanels;
    if (panels - panel >= kTilePanels) {
      multiply_tiles<Format, kTilePanels>(product, first_row, panel);
    } else {
      multiply_tiles<Format, 1>(product, first_row, panel);
    }
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
