// The products with quantised weights in integers, on x86 processors with AVX-512 and VNNI; all else
// is what AVX-512 has. See integers.h.
#include "kernels.h"

#if defined(__x86_64__)
namespace {
// Runs on every processor, so that it comes before what does not.
bool is_supported() {
  return kernels_of_avx512.is_supported() && __builtin_cpu_supports("avx512vnni");
}
}  // namespace

namespace vnni {
void multiply(const Product& product);
}

const Kernels kernels_of_vnni =
    with_products(kernels_of_avx512, "vnni", is_supported, vnni::multiply);

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#endif

#define KERNELS vnni
#define LANES 16
#include "vectors.h"
// Formats need vectors.
#include "formats.h"
// Integers need formats.
#include "integers.h"

namespace vnni {

constexpr int kMostRows = 6;  // at once: their sums have registers

// sums[p][r] = the rows [first, first + ROWS) of a tile times PANELS panels.
template <class Format, int ROWS, int PANELS>
void multiply(const char* panel, std::int64_t stride, const Bytes* x, std::int64_t groups,
              int first, float* sums, std::int64_t sums_stride) {
  Floats sum[ROWS][PANELS] = {};
  for (const Bytes* end = x + groups; x < end; ++x) {
    Ints products[ROWS][PANELS][Bytes::kParts] = {};
    Bits quads[PANELS][kQuads];
    for (int p = 0; p < PANELS; ++p) Format::expand(panel + p * stride, quads[p]);
#pragma GCC unroll 8
    for (int quad = 0; quad < kQuads; ++quad) {
      for (int r = 0; r < ROWS; ++r) {
        for (int part = 0; part < Bytes::kParts; ++part) {
          const __m512i four = _mm512_set1_epi32(x->quad(part, first + r, quad));
          for (int p = 0; p < PANELS; ++p) {
            products[r][p][part] = (Ints)_mm512_dpbusd_epi32((__m512i)products[r][p][part],
                                                              (__m512i)quads[p][quad], four);
          }
        }
      }
    }
    for (int p = 0; p < PANELS; ++p) {
      const Floats scale = Format::scale(panel + p * stride);
      const Floats offset = Format::offset(panel + p * stride);
      for (int r = 0; r < ROWS; ++r) {
        sum[r][p] = Format::add(sum[r][p], products[r][p], scale, offset, *x, first + r);
      }
    }
    panel += bytes_of_group<typename Format::Stored>();
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int p = 0; p < PANELS; ++p) store(sums + p * sums_stride + r * kColumns, sum[r][p]);
  }
}

// Panels for so many rows: enough sums that none waits for itself.
constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

template <class Format, int PANELS, int ROWS = kMostRows>
void multiply_rows(int rows, const char* panel, std::int64_t stride, const Bytes* x,
                   std::int64_t groups, int first, float* sums, std::int64_t sums_stride) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) {
      constexpr int kPanels = PANELS > 0 ? PANELS : panels_at_once(ROWS);
      multiply<Format, ROWS, kPanels>(panel, stride, x, groups, first, sums, sums_stride);
    } else {
      multiply_rows<Format, PANELS, ROWS - 1>(rows, panel, stride, x, groups, first, sums,
                                              sums_stride);
    }
  }
}

// Panels [panel, end) of all rows.
template <class Format>
void multiply_panels(const Product& product, const Bytes* x, std::int64_t tiles, std::int64_t panel,
                     std::int64_t end) {
  const std::int64_t groups = product.in_features / kGroup;
  const std::int64_t stride = bytes_of_panel<typename Format::Stored>(product.in_features);
  constexpr int kStride = kMostRows * kColumns;
  float sums[4 * kStride];
  const int parts_of_tile = (kTileRows + kMostRows - 1) / kMostRows;
  const int most = product.rows < kMostRows ? panels_at_once(static_cast<int>(product.rows)) : 1;
  while (panel < end) {
    const int panels = end - panel >= most ? most : 1;
    const char* weights = product.packed + panel * stride;
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t left = product.rows - tile * kTileRows;
      const int rows = left < kTileRows ? static_cast<int>(left) : kTileRows;
      const int parts = rows <= kMostRows ? 1 : parts_of_tile;
      for (int part = 0; part < parts; ++part) {  // of equal sizes, or smaller by one
        const int first = rows * part / parts, count = rows * (part + 1) / parts - first;
        if (panels > 1) {
          multiply_rows<Format, 0>(count, weights, stride, x + tile * groups, groups, first, sums,
                                   kStride);
        } else {
          multiply_rows<Format, 1>(count, weights, stride, x + tile * groups, groups, first, sums,
                                   kStride);
        }
        for (int p = 0; p < panels; ++p) {
          write_sums(product, panel + p, tile * kTileRows + first, count, sums + p * kStride);
        }
      }
    }
    panel += panels;
  }
}

template <class Format>
void multiply_all(const Product& product) {
  const std::int64_t panels = (product.out_features + kColumns - 1) / kColumns;
  multiply_split<Format, Bytes>(
      product, [&](const Product& part, const Bytes* x, std::int64_t tiles) {
        share_panels(panels, [&](std::int64_t first, std::int64_t end) {
          multiply_panels<Format>(part, x, tiles, first, end);
        });
      });
}

void multiply(const Product& product) {
  switch (product.format) {
    case Format::int4: return multiply_all<Int4Bytes>(product);
    case Format::int8: return multiply_all<Int8Bytes>(product);
    default: kernels_of_avx512.multiply(product);
  }
}

}  // namespace vnni

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
