// The products of many rows with quantised weights, on x86 processors with AMX: the integers of
// integers.h in its matrix unit, with the same results as VNNI's. All else is what VNNI has.
#include "kernels.h"

#if HAS_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {
// Runs on every processor, so that it comes before what does not.
bool is_supported() {
  constexpr unsigned kTilesOfIntegers = 3u << 24;             // AMX-TILE and AMX-INT8
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // of Linux, for this process
  unsigned eax, ebx, ecx, edx = 0;
  return kernels_of_vnni.is_supported() && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) &&
         (edx & kTilesOfIntegers) == kTilesOfIntegers &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
}  // namespace

namespace amx {
void multiply(const Product& product);
}

const Kernels kernels_of_amx =
    with_products(kernels_of_avx512, "amx", is_supported, amx::multiply);

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,amx-tile,amx-int8"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,amx-tile,amx-int8")
#endif

#define KERNELS amx
#define LANES 16
#include "vectors.h"
// Formats need vectors.
#include "formats.h"
// Integers need formats.
#include "integers.h"

namespace amx {

constexpr std::int64_t kFewRows = 4;           // that VNNI multiplies as fast
constexpr std::int64_t kBlock = 8;             // tiles of x that pass over a group of weights
constexpr int kResult = kTileRows * kColumns;  // sums of a tile, for one digit and panel

// Weights of 4 bits leave room for another 4 in a byte: 16 times the weights, and the weights
// themselves, meet the higher and the lower bits of integers of 12.
struct HalfIntegers : Rows<2, 2 * kGroup> {
  template <class Format>
  void keep(int row, int at, Ints integers, __m128i order) {
    for (int part = 0; part < kParts; ++part) {
      const Ints low = integers & 15, high = (integers >> 4) << 24 >> 24;
      integers = (integers - 16 * high - low) >> 12;
      std::int8_t* const to = parts[part][row] + at;
      store(to, _mm_shuffle_epi8(_mm512_cvtepi32_epi8((__m512i)high), order));
      store(to + kGroup, _mm_shuffle_epi8(_mm512_cvtepi32_epi8((__m512i)low), order));
    }
  }
  // Exact but for its last rounding, as `Bytes` is for weights of 4 bits.
  static Floats combine(const Ints (&sums)[kParts]) {
    return multiply_add(__builtin_convertvector(sums[1], Floats), all(4096.0f),
                        __builtin_convertvector(sums[0], Floats));
  }
};

struct Int4Tiles : Int4Bytes {
  using Parts = HalfIntegers;
  static void expand_tile(const char* group, Bits (&rows)[2 * kQuads]) {
    Bits quads[kQuads];
    expand(group, quads);
    for (int i = 0; i < kQuads; ++i) {
      rows[i] = quads[i] << 4;
      rows[kQuads + i] = quads[i];
    }
  }
};

struct Int8Tiles : Int8Bytes {
  using Parts = Bytes;
  static void expand_tile(const char* group, Bits (&rows)[kQuads]) { expand(group, rows); }
};

// A group of a panel as the products need it.
template <class Format>
struct Group {
  Bits rows[Format::Parts::kBytes / 4];
  Floats scale, offset;
};

// Tile registers: 0 to 3 results, 4 and 5 parts of x, 6 and 7 the weights of two panels.
void configure(int rows, int bytes) {
  struct {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t bytes_of_row[16] = {64, 64, 64, 64, 0, 0, 64, 64};
    std::uint8_t rows[16] = {};
  } config;
  for (int tile = 0; tile < 6; ++tile) config.rows[tile] = static_cast<std::uint8_t>(rows);
  config.bytes_of_row[4] = config.bytes_of_row[5] = static_cast<std::uint16_t>(bytes);
  config.rows[6] = config.rows[7] = static_cast<std::uint8_t>(bytes / 4);
  // As the compilers' own function, of which GCC before 12.4 takes the first bytes alone as read.
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

// results[part][panel] = the parts of a tile of x times two panels of weights, over a group.
template <class Parts>
inline void multiply_tile(const Parts& x, std::int32_t* results) {
  constexpr int kStride = 4 * kColumns;
  _tile_zero(0);
  _tile_zero(1);
  _tile_loadd(4, x.parts[0], Parts::kBytes);
  _tile_dpbsud(0, 4, 6);
  _tile_dpbsud(1, 4, 7);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(5, x.parts[1], Parts::kBytes);
  _tile_dpbsud(2, 5, 6);
  _tile_dpbsud(3, 5, 7);
  _tile_stored(0, results, kStride);
  _tile_stored(1, results + kResult, kStride);
  if constexpr (Parts::kParts > 2) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(4, x.parts[2], Parts::kBytes);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
  }
  _tile_stored(2, results + 2 * kResult, kStride);
  _tile_stored(3, results + 3 * kResult, kStride);
  if constexpr (Parts::kParts > 2) {
    _tile_stored(0, results + 4 * kResult, kStride);
    _tile_stored(1, results + 5 * kResult, kStride);
  }
}

// `count` tiles of x, each of `groups`, times two panels, or one, which then counts twice. What the
// matrix unit reads was written, and what it has written is read, one step earlier and later: it
// would wait for memory otherwise.
template <class Format>
void multiply_panels(const Product& product, const typename Format::Parts* x, std::int64_t first,
                     std::int64_t count, std::int64_t panel, int panels) {
  using Stored = typename Format::Stored;
  using Parts = typename Format::Parts;
  constexpr int kResults = Parts::kParts * 2 * kResult, kRing = 4;  // groups that are still needed
  const std::int64_t groups = product.in_features / kGroup;
  const std::int64_t panel_stride = panels > 1 ? bytes_of_panel<Stored>(product.in_features) : 0;
  const std::int64_t sums_stride = count * kResult;
  constexpr int kWeights = kRing * 2 * sizeof(Group<Format>) / 4;
  float* memory = pool::scratch(2 * kResults + kWeights + 2 * sums_stride);
  std::int32_t* results = reinterpret_cast<std::int32_t*>(memory);
  Group<Format>* weights = reinterpret_cast<Group<Format>*>(memory + 2 * kResults);
  float* sums = reinterpret_cast<float*>(weights + 2 * kRing);
  __builtin_memset(sums, 0, sizeof(float) * 2 * sums_stride);
  const char* packed = product.packed + panel * bytes_of_panel<Stored>(product.in_features);

  const auto expand = [&](std::int64_t g) {
    for (int p = 0; p < 2; ++p) {
      const char* group = packed + p * panel_stride + g * bytes_of_group<Stored>();
      Group<Format>& out = weights[g % kRing * 2 + p];
      Format::expand_tile(group, out.rows);
      out.scale = Format::scale(group);
      out.offset = Format::offset(group);
    }
  };
  const auto add_step = [&](std::int64_t step) {
    const std::int64_t g = step / count, t = step % count;
    const Parts& parts = x[(first + t) * groups + g];
    const std::int64_t left = product.rows - (first + t) * kTileRows;
    const int rows = left < kTileRows ? static_cast<int>(left) : kTileRows;
    for (int p = 0; p < panels; ++p) {
      const std::int32_t* low = results + step % 2 * kResults + p * kResult;
      const Floats scale = weights[g % kRing * 2 + p].scale;
      const Floats offset = weights[g % kRing * 2 + p].offset;
      float* sum = sums + p * sums_stride + t * kResult;
      for (int r = 0; r < rows; ++r) {
        Ints products[Parts::kParts];
        for (int part = 0; part < Parts::kParts; ++part) {
          products[part] = load<Ints>(low + 2 * part * kResult + r * kColumns);
        }
        const Floats before = load(sum + r * kColumns);
        store(sum + r * kColumns, Format::add(before, products, scale, offset, parts, r));
      }
    }
  };

  expand(0);
  std::int64_t step = 0;
  for (std::int64_t g = 0; g < groups; ++g) {
    __asm__ volatile("" ::: "memory");  // GCC does not see that tiles are read from there
    _tile_loadd(6, weights[g % kRing * 2].rows, 4 * kColumns);
    _tile_loadd(7, weights[g % kRing * 2 + 1].rows, 4 * kColumns);
    if (g + 1 < groups) expand(g + 1);
    for (std::int64_t t = 0; t < count; ++t, ++step) {
      multiply_tile(x[(first + t) * groups + g], results + step % 2 * kResults);
      if (step > 0) add_step(step - 1);
    }
  }
  add_step(step - 1);
  const std::int64_t first_row = first * kTileRows, left = product.rows - first_row;
  const int rows = static_cast<int>(left < count * kTileRows ? left : count * kTileRows);
  for (int p = 0; p < panels; ++p) {
    write_sums(product, panel + p, first_row, rows, sums + p * sums_stride);
  }
}

template <class Format>
void multiply_all(const Product& product) {
  using Parts = typename Format::Parts;
  const std::int64_t panels = (product.out_features + kColumns - 1) / kColumns;
  multiply_split<Format, Parts>(product, [&](const Product& part, const Parts* x,
                                             std::int64_t tiles) {
    const std::int64_t blocks = (tiles + kBlock - 1) / kBlock;
    const std::int64_t share = panels * blocks / (8 * pool::num_threads()) / 2 * 2;
    const std::int64_t size = share < 2 ? 2 : share > 8 ? 8 : share;
    const std::int64_t units = (panels + size - 1) / size;
    pool::run(blocks * units, [&](std::int64_t unit) {
      const std::int64_t first = unit / units * kBlock, left = tiles - first;
      const std::int64_t count = left < kBlock ? left : kBlock;
      const std::int64_t end_of_unit = (unit % units + 1) * size;
      const std::int64_t end = end_of_unit < panels ? end_of_unit : panels;
      configure(part.rows < kTileRows ? static_cast<int>(part.rows) : kTileRows, Parts::kBytes);
      for (std::int64_t panel = unit % units * size; panel < end; panel += 2) {
        multiply_panels<Format>(part, x, first, count, panel, panel + 1 < end ? 2 : 1);
      }
      _tile_release();
    });
  });
}

void multiply(const Product& product) {
  if (product.rows <= kFewRows) return kernels_of_vnni.multiply(product);
  switch (product.format) {
    case Format::int4: return multiply_all<Int4Tiles>(product);
    case Format::int8: return multiply_all<Int8Tiles>(product);
    default: kernels_of_vnni.multiply(product);
  }
}

}  // namespace amx

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
