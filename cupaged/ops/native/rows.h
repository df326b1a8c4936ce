// Norms, activations and rotations: what happens to each token by itself.
#pragma once

namespace KERNELS {

// Units of work that are worth a thread's while, in floats.
constexpr std::int64_t kShare = 4096;

template <class Work>
void for_rows(std::int64_t rows, std::int64_t columns, const Work& work) {
  const std::int64_t share = columns >= kShare ? 1 : kShare / columns;
  pool::run((rows + share - 1) / share, [&](std::int64_t unit) {
    const std::int64_t end = (unit + 1) * share < rows ? (unit + 1) * share : rows;
    for (std::int64_t row = unit * share; row < end; ++row) work(row);
  });
}

// Calls at_once(i) for whole vectors of the columns and one_by_one(i) for the rest.
template <class Whole, class Single>
inline void for_columns(std::int64_t columns, const Whole& at_once, const Single& one_by_one) {
  std::int64_t i = 0;
  for (; i + kLanes <= columns; i += kLanes) at_once(i);
  for (; i < columns; ++i) one_by_one(i);
}

void rms_norm(float* out, float* residual, const float* x, const float* weight, float eps,
              std::int64_t rows, std::int64_t columns) {
  for_rows(rows, columns, [&](std::int64_t row) {
    float* a = residual + row * columns;
    float* o = out + row * columns;
    if (x != nullptr) {
      const float* b = x + row * columns;
      for_columns(
          columns, [&](std::int64_t i) { store(a + i, load(a + i) + load(b + i)); },
          [&](std::int64_t i) { a[i] += b[i]; });
    }
    Floats squares[2] = {};
    float rest = 0.0f;
    for_columns(
        columns,
        [&](std::int64_t i) {
          const Floats value = load(a + i);
          squares[i / kLanes % 2] += value * value;
        },
        [&](std::int64_t i) { rest += a[i] * a[i]; });
    const float mean = (sum(squares[0] + squares[1]) + rest) / static_cast<float>(columns);
    const float factor = 1.0f / __builtin_sqrtf(mean + eps);
    for_columns(
        columns,
        [&](std::int64_t i) { store(o + i, load(a + i) * factor * load(weight + i)); },
        [&](std::int64_t i) { o[i] = a[i] * factor * weight[i]; });
  });
}

inline Floats silu(Floats gate) { return gate / (1.0f + exponential(-gate)); }

void silu_mul(float* out, const float* gate_up, std::int64_t rows, std::int64_t columns) {
  for_rows(rows, columns, [&](std::int64_t row) {
    const float* gate = gate_up + row * 2 * columns;
    const float* up = gate + columns;
    float* o = out + row * columns;
    for_columns(
        columns, [&](std::int64_t i) { store(o + i, silu(load(gate + i)) * load(up + i)); },
        [&](std::int64_t i) { o[i] = silu(all(gate[i]))[0] * up[i]; });
  });
}

void rotate_and_keep(const Rotation& args) {
  const Pages& pages = args.pages;
  const std::int64_t half = pages.k_dim / 2;
  const std::int64_t turned = (args.query_heads + pages.kv_heads) * pages.k_dim;
  const std::int64_t width = turned + pages.kv_heads * pages.v_dim;
  for_rows(args.tokens, width, [&](std::int64_t token) {
    float* row = args.qkv + token * width;
    const float* cos = args.table + args.positions[token] * half;
    const float* sin = cos + args.table_rows * half;
    for (float* head = row; head < row + turned; head += pages.k_dim) {
      float* real = head;
      float* imaginary = head + half;
      for_columns(
          half,
          [&](std::int64_t i) {
            const Floats c = load(cos + i), s = load(sin + i);
            const Floats a = load(real + i), b = load(imaginary + i);
            store(real + i, a * c - b * s);
            store(imaginary + i, b * c + a * s);
          },
          [&](std::int64_t i) {
            const float a = real[i], b = imaginary[i];
            real[i] = a * cos[i] - b * sin[i];
            imaginary[i] = b * cos[i] + a * sin[i];
          });
    }
    const std::int64_t slot = args.slots[token];
    if (slot < 0) return;
    const std::int64_t block = slot / pages.block_size, offset = slot % pages.block_size;
    const float* k = row + args.query_heads * pages.k_dim;
    const float* v = row + turned;
    for (std::int64_t head = 0; head < pages.kv_heads; ++head) {
      const std::int64_t at = (block * pages.kv_heads + head) * pages.block_size + offset;
      __builtin_memcpy(pages.k + at * pages.k_dim, k + head * pages.k_dim, 4 * pages.k_dim);
      __builtin_memcpy(pages.v + at * pages.v_dim, v + head * pages.v_dim, 4 * pages.v_dim);
    }
  });
}

}  // namespace KERNELS
