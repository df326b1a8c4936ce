// What the kernels take, and the table of them that each kind of processor has.
//
// Arrays are C-contiguous; what they hold was checked by the caller.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "pool.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "weights are read as little-endian processors have them"
#endif

enum class Format : int { float32 = 0, bfloat16 = 1, int8 = 2, int4 = 3 };

// out [rows, out_features] = x [rows, in_features] times packed weights (+ bias); see products.h.
// To gather rows of the weights, x is not used and out is [rows, in_features].
struct Product {
  float* out;
  const float* x;
  const char* packed;
  const float* bias;  // or null
  Format format;
  std::int64_t rows, out_features, in_features;
};

// Pages are [num_blocks, kv_heads, block_size, k_dim or v_dim].
struct Pages {
  float* k;
  float* v;
  std::int64_t kv_heads, block_size, k_dim, v_dim;
};

// qkv: [tokens, (query_heads + kv_heads) k_dim + kv_heads v_dim]; table: cosines, then sines, each
// [positions of the model, k_dim / 2]; slots: of each token, -1 for one that is not kept.
struct Rotation {
  float* qkv;
  const std::int32_t* positions;
  const float* table;
  const std::int64_t* slots;
  Pages pages;
  std::int64_t tokens, query_heads, table_rows;
};

// out: [tokens, query_heads v_dim]; block_table: [sequences, columns]; tasks: [num_tasks, 3], each a
// sequence, the first of its tokens in the step, and how many; a token belongs to one task.
struct Attention {
  float* out;
  const float* qkv;
  const std::int32_t* positions;
  const std::int32_t* block_table;
  const std::int32_t* tasks;
  Pages pages;
  std::int64_t num_tasks, columns, query_heads;
  float scale;
};

struct Kernels {
  const char* name;
  bool (*is_supported)();
  void (*multiply)(const Product&);
  void (*gather)(const Product&, const std::int32_t* ids);
  // residual += x unless x is null; out = residual / sqrt(mean(residual^2) + eps) * weight
  void (*rms_norm)(float* out, float* residual, const float* x, const float* weight, float eps,
                   std::int64_t rows, std::int64_t columns);
  void (*silu_mul)(float* out, const float* gate_up, std::int64_t rows, std::int64_t columns);
  void (*rotate_and_keep)(const Rotation&);
  void (*attend)(const Attention&);
};

// Others with products of their own. Runs on every processor.
inline Kernels with_products(Kernels kernels, const char* name, bool (*is_supported)(),
                             void (*multiply)(const Product&)) {
  kernels.name = name;
  kernels.is_supported = is_supported;
  kernels.multiply = multiply;
  return kernels;
}

extern const Kernels kernels_of_any;
#if defined(__x86_64__)
extern const Kernels kernels_of_avx2;
extern const Kernels kernels_of_avx512;
extern const Kernels kernels_of_vnni;
#endif

// Compilers that know AMX, and a system that must be asked for it.
#if defined(__x86_64__) && defined(__linux__) && \
    (defined(__clang__) ? __clang_major__ >= 11 : __GNUC__ >= 11)
#define HAS_AMX 1
extern const Kernels kernels_of_amx;
#else
#define HAS_AMX 0
#endif
