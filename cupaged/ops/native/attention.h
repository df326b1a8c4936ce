// Attention through the block table: every key and value is read once from its block for all queries
// of a task, and meets them while it is in the nearest cache.
//
// A task is a few tokens of one sequence and the query heads that share a KV head. Its keys come in
// tiles of 64 positions, counted from the sequence's first; maximum, sum of weights and weighted
// sum of values are carried from tile to tile (online softmax, Milakov and Gimelshein, 2018). What a
// query gets does not depend on the other queries of its task, nor on anything else in the step.
#pragma once

namespace KERNELS {

constexpr int kKeys = 64;  // of a tile

// Swaps the elements of a and b whose columns have, and have not, the bit `DISTANCE`.
template <int DISTANCE>
inline void exchange(Floats& a, Floats& b) {
#if defined(__clang__)  // makes shuffles of this
  const Floats x = a, y = b;
  for (int i = 0; i < kLanes; ++i) {
    const bool upper = (i & DISTANCE) != 0;
    a[i] = upper ? y[i - DISTANCE] : x[i];
    b[i] = upper ? y[i] : x[i + DISTANCE];
  }
#else
  Ints low, high;
  for (int i = 0; i < kLanes; ++i) {
    const bool upper = (i & DISTANCE) != 0;
    low[i] = upper ? kLanes + i - DISTANCE : i;
    high[i] = upper ? kLanes + i : i + DISTANCE;
  }
  const Floats both_low = __builtin_shuffle(a, b, low);
  b = __builtin_shuffle(a, b, high);
  a = both_low;
#endif
}

template <int DISTANCE>
inline void transpose(Floats (&rows)[kLanes]) {
  if constexpr (DISTANCE > 0) {
    for (int i = 0; i < kLanes; ++i) {
      if ((i & DISTANCE) == 0) exchange<DISTANCE>(rows[i], rows[i + DISTANCE]);
    }
    transpose<DISTANCE / 2>(rows);
  }
}

// Memory of a task; see `attend_task`.
struct Task {
  float* queries;   // [rows, k_dim], scaled
  float* scores;    // [4 panels, rows, 16]
  float* weights;   // [rows, kKeys]
  float* values;    // [rows, v_dim]
  float* maximum;   // [rows]
  float* total;     // [rows]
  float* keys;      // [4 panels, k_dim, 16]
};

// keys[panel][d][column] = rows[16 panel + column][d]; rows that are not there count as zeros.
inline void lay_out_keys(const float* const* rows, int count, int k_dim, float* keys) {
  const int whole = k_dim / kLanes * kLanes;
  for (int first = 0; first < count; first += kLanes) {
    float* out = keys + first / kColumns * k_dim * kColumns + first % kColumns;
    for (int d = 0; d < whole; d += kLanes) {
      Floats block[kLanes];
      for (int j = 0; j < kLanes; ++j) {
        block[j] = first + j < count ? load(rows[first + j] + d) : Floats{};
      }
      transpose<kLanes / 2>(block);
      for (int j = 0; j < kLanes; ++j) store(out + (d + j) * kColumns, block[j]);
    }
    for (int d = whole; d < k_dim; ++d) {
      for (int j = 0; j < kLanes; ++j) {
        out[d * kColumns + j] = first + j < count ? rows[first + j][d] : 0.0f;
      }
    }
  }
}

// values[r][c] += weights[r][j] * rows[j][c] for VECTORS vectors of columns.
template <int ROWS, int VECTORS>
inline void add_values(const float* weights, const float* const* rows, int count, int column,
                       float* values, std::int64_t stride) {
  Floats sum[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < VECTORS; ++v) sum[r][v] = load(values + r * stride + column + v * kLanes);
  }
  for (int j = 0; j < count; ++j) {
    Floats value[VECTORS];
    for (int v = 0; v < VECTORS; ++v) value[v] = load(rows[j] + column + v * kLanes);
    for (int r = 0; r < ROWS; ++r) {
      const float weight = weights[r * kKeys + j];
      for (int v = 0; v < VECTORS; ++v) sum[r][v] += weight * value[v];
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < VECTORS; ++v) store(values + r * stride + column + v * kLanes, sum[r][v]);
  }
}

template <int VECTORS, int ROWS = 3>
inline void add_values_of_rows(int rows, const float* weights, const float* const* value_rows,
                               int count, int column, float* values, std::int64_t stride) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) {
      add_values<ROWS, VECTORS>(weights, value_rows, count, column, values, stride);
    } else {
      add_values_of_rows<VECTORS, ROWS - 1>(rows, weights, value_rows, count, column, values,
                                            stride);
    }
  }
}

inline void add_all_values(const Task& task, int rows, const float* const* value_rows, int count,
                           std::int64_t v_dim) {
  constexpr int kWide = 4;  // vectors of columns that pass over all keys at once
  for (int first = 0; first < rows; first += 3) {
    const int some = rows - first < 3 ? rows - first : 3;
    const float* weights = task.weights + first * kKeys;
    float* values = task.values + first * v_dim;
    int column = 0;
    for (; column + kWide * kLanes <= v_dim; column += kWide * kLanes) {
      add_values_of_rows<kWide>(some, weights, value_rows, count, column, values, v_dim);
    }
    for (; column + kLanes <= v_dim; column += kLanes) {
      add_values_of_rows<1>(some, weights, value_rows, count, column, values, v_dim);
    }
    for (; column < v_dim; ++column) {
      for (int r = 0; r < some; ++r) {
        for (int j = 0; j < count; ++j) {
          values[r * v_dim + column] += weights[r * kKeys + j] * value_rows[j][column];
        }
      }
    }
  }
}

// The weights of a row's first `count` keys, and zeros behind them; carries the row on to this tile.
inline void weigh(const Task& task, int row, int rows, int count, std::int64_t v_dim) {
  float* weights = task.weights + row * kKeys;
  if (count <= 0) {
    __builtin_memset(weights, 0, sizeof(float) * kKeys);
    return;
  }
  const float least = -__builtin_inff();
  Floats maximum = all(least);
  for (int j = 0; j < kKeys; j += kLanes) {
    Floats scores = all(least);
    if (j < count) {
      const float* from = task.scores + (j / kColumns * rows + row) * kColumns + j % kColumns;
      scores = load(from);
      for (int lane = count - j; lane < kLanes; ++lane) scores[lane] = least;
    }
    store(weights + j, scores);
    maximum = scores > maximum ? scores : maximum;
  }
  float after = task.maximum[row];
  for (int lane = 0; lane < kLanes; ++lane) {
    after = maximum[lane] > after ? maximum[lane] : after;
  }
  Floats total = {};
  for (int j = 0; j < kKeys; j += kLanes) {
    const Floats weight = exponential(load(weights + j) - after);
    store(weights + j, weight);
    total += weight;
  }
  const float kept = exponential(all(task.maximum[row] - after))[0];
  task.maximum[row] = after;
  task.total[row] = task.total[row] * kept + sum(total);
  float* values = task.values + row * v_dim;
  for (std::int64_t i = 0; i < v_dim; ++i) values[i] *= kept;
}

inline void attend_task(const Attention& args, std::int64_t sequence, std::int64_t kv_head,
                        std::int64_t first, int tokens) {
  const Pages& pages = args.pages;
  const std::int64_t k_dim = pages.k_dim, v_dim = pages.v_dim, size = pages.block_size;
  const int per_head = static_cast<int>(args.query_heads / pages.kv_heads);
  const int rows = tokens * per_head;
  const std::int64_t width = (args.query_heads + pages.kv_heads) * k_dim + pages.kv_heads * v_dim;
  Task task;
  task.queries = pool::scratch(rows * (k_dim + 2 * kKeys + v_dim + 2) + kKeys * k_dim);
  task.scores = task.queries + rows * k_dim;
  task.weights = task.scores + rows * kKeys;
  task.values = task.weights + rows * kKeys;
  task.maximum = task.values + rows * v_dim;
  task.total = task.maximum + rows;
  task.keys = task.total + rows;
  for (int row = 0; row < rows; ++row) {
    const std::int64_t head = kv_head * per_head + row % per_head;
    const float* q = args.qkv + (first + row / per_head) * width + head * k_dim;
    for (std::int64_t i = 0; i < k_dim; ++i) task.queries[row * k_dim + i] = q[i] * args.scale;
    task.maximum[row] = -__builtin_inff();
    task.total[row] = 0.0f;
  }
  __builtin_memset(task.values, 0, sizeof(float) * rows * v_dim);
  const std::int32_t* table = args.block_table + sequence * args.columns;
  const std::int64_t end = std::int64_t{args.positions[first + tokens - 1]} + 1;
  for (std::int64_t start = 0; start < end; start += kKeys) {
    const int count = end - start < kKeys ? static_cast<int>(end - start) : kKeys;
    const float *k_rows[kKeys], *v_rows[kKeys];
    for (int j = 0; j < count; ++j) {
      const std::int64_t block = table[(start + j) / size], offset = (start + j) % size;
      const std::int64_t at = (block * pages.kv_heads + kv_head) * size + offset;
      k_rows[j] = pages.k + at * k_dim;
      v_rows[j] = pages.v + at * v_dim;
    }
    lay_out_keys(k_rows, count, static_cast<int>(k_dim), task.keys);
    const int panels = (count + kColumns - 1) / kColumns;
    __builtin_memset(task.scores, 0, sizeof(float) * rows * kKeys);
    const int parts = (rows + kMostRows - 1) / kMostRows;
    for (int panel = 0; panel < panels; ++panel) {
      for (int part = 0; part < parts; ++part) {
        const int begin = rows * part / parts, stop = rows * (part + 1) / parts;
        multiply_rows<Float32, 1>(
            stop - begin, reinterpret_cast<const char*>(task.keys + panel * k_dim * kColumns), 0,
            task.queries + begin * k_dim, k_dim, static_cast<int>(k_dim),
            task.scores + (panel * rows + begin) * kColumns, 0);
      }
    }
    for (int row = 0; row < rows; ++row) {
      const std::int64_t seen = args.positions[first + row / per_head] - start + 1;
      weigh(task, row, rows, seen < count ? static_cast<int>(seen) : count, v_dim);
    }
    add_all_values(task, rows, v_rows, count, v_dim);
  }
  for (int row = 0; row < rows; ++row) {
    const std::int64_t head = kv_head * per_head + row % per_head;
    float* out = args.out + ((first + row / per_head) * args.query_heads + head) * v_dim;
    const float* values = task.values + row * v_dim;
    for (std::int64_t i = 0; i < v_dim; ++i) out[i] = values[i] / task.total[row];
  }
}

void attend(const Attention& args) {
  const std::int64_t kv_heads = args.pages.kv_heads;
  pool::run(args.num_tasks * kv_heads, [&](std::int64_t unit) {
    const std::int32_t* task = args.tasks + unit / kv_heads * 3;
    attend_task(args, task[0], unit % kv_heads, task[1], task[2]);
  });
}

}  // namespace KERNELS
