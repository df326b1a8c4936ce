// Weights as checkpoints have them, laid out for products.h.
#pragma once

#include <cstdint>

#include "kernels.h"

// How a checkpoint has the numbers of a row. The quantised ones come in blocks of 32, as ggml defines
// them: a half d and 32 signed bytes; a half d and 16 bytes; halves d and m and 16 bytes. Byte j of
// the 16 has number j in its low four bits, number j + 16 in the others.
enum class Stored : int { float32 = 0, bfloat16 = 1, q8_0 = 2, q4_0 = 3, q4_1 = 4 };

// Whether rows that are stored so can be laid out so.
bool can_pack(Stored stored, Format format);

std::int64_t bytes_per_row(Stored stored, std::int64_t in_features);

// Of all panels; see products.h.
std::int64_t packed_bytes(Format format, std::int64_t out_features, std::int64_t in_features);

// rows: [out_features, bytes_per_row]. From float32, bfloat16 is rounded to the nearest number, and
// int8 is what ggml's Q8_0 would be.
void pack(char* packed, Format format, const char* rows, Stored stored, std::int64_t out_features,
          std::int64_t in_features);
