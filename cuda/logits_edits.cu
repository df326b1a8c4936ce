// Edits of logits before anything is drawn, in place, at pairs (row, token id).
//
//   add_bias:         logit += value
//   penalize:         logit = logit > 0 ? logit / value : logit * value
//   subtract:         logit -= value
//   save_allowed:     value = logit
//   forbid_rows:      logit = -inf, in whole rows
//   restore_allowed:  logit = value
//   ban:              logit = -inf
//
// A row in which only some tokens are allowed is save_allowed, forbid_rows and restore_allowed, one
// after the other.
//
// Arrays: logits float32 [num_rows, vocab_size], aligned to 16 bytes; pairs int32 [num_pairs, 2],
// inside of it; values float32 [num_pairs]; rows int32 [num_rows_forbidden]. For add_bias, penalize
// and subtract no pair stands twice.
//
// Grid: (ceil(num_pairs / block)), a thread a pair, but forbid_rows: (rows, any), where the blocks
// of a row share it. Block: up to 256 threads. Each result is rounded once; nothing is summed.
//
// No define. Cost: 20 bytes a pair in scattered accesses, 4 vocab_size bytes a forbidden row; bound
// by the launches.
constexpr int MAX_THREADS = 256;

__device__ __forceinline__ float negative_infinity() { return __uint_as_float(0xff800000u); }

__device__ __forceinline__ int pair_number() { return blockIdx.x * blockDim.x + threadIdx.x; }

__device__ __forceinline__ long long place_of(const int* pairs, int i, int vocab_size) {
  const int2 pair = reinterpret_cast<const int2*>(pairs)[i];
  return (long long)pair.x * vocab_size + pair.y;
}

extern "C" __global__ __launch_bounds__(MAX_THREADS) void add_bias(
    float* __restrict__ logits,        // [num_rows, vocab_size]
    const int* __restrict__ pairs,     // [num_pairs, 2]
    const float* __restrict__ values,  // [num_pairs]
    int num_pairs,
    int vocab_size) {
  const int i = pair_number();
  if (i >= num_pairs) return;
  float* logit = logits + place_of(pairs, i, vocab_size);
  *logit = __fadd_rn(*logit, values[i]);
}

extern "C" __global__ __launch_bounds__(MAX_THREADS) void penalize(
    float* __restrict__ logits,        // [num_rows, vocab_size]
    const int* __restrict__ pairs,     // [num_pairs, 2]
    const float* __restrict__ values,  // [num_pairs]
    int num_pairs,
    int vocab_size) {
  const int i = pair_number();
  if (i >= num_pairs) return;
  float* logit = logits + place_of(pairs, i, vocab_size);
  *logit = *logit > 0.0f ? __fdiv_rn(*logit, values[i]) : __fmul_rn(*logit, values[i]);
}

extern "C" __global__ __launch_bounds__(MAX_THREADS) void subtract(
    float* __restrict__ logits,        // [num_rows, vocab_size]
    const int* __restrict__ pairs,     // [num_pairs, 2]
    const float* __restrict__ values,  // [num_pairs]
    int num_pairs,
    int vocab_size) {
  const int i = pair_number();
  if (i >= num_pairs) return;
  float* logit = logits + place_of(pairs, i, vocab_size);
  *logit = __fsub_rn(*logit, values[i]);
}

extern "C" __global__ __launch_bounds__(MAX_THREADS) void save_allowed(
    float* __restrict__ values,        // [num_pairs]
    const float* __restrict__ logits,  // [num_rows, vocab_size]
    const int* __restrict__ pairs,     // [num_pairs, 2]
    int num_pairs,
    int vocab_size) {
  const int i = pair_number();
  if (i < num_pairs) values[i] = logits[place_of(pairs, i, vocab_size)];
}

extern "C" __global__ __launch_bounds__(MAX_THREADS) void forbid_rows(
    float* __restrict__ logits,    // [num_rows, vocab_size]
    const int* __restrict__ rows,  // [gridDim.x]
    int vocab_size) {
  float* row = logits + (long long)rows[blockIdx.x] * vocab_size;
  const int first = blockIdx.y * blockDim.x + threadIdx.x;
  const int step = gridDim.y * blockDim.x;
  const float none = negative_infinity();
  if (vocab_size % 4 == 0) {
    for (int i = first; i < vocab_size / 4; i += step) {
      reinterpret_cast<float4*>(row)[i] = make_float4(none, none, none, none);
    }
  } else {
    for (int i = first; i < vocab_size; i += step) row[i] = none;
  }
}

extern "C" __global__ __launch_bounds__(MAX_THREADS) void restore_allowed(
    float* __restrict__ logits,        // [num_rows, vocab_size]
    const int* __restrict__ pairs,     // [num_pairs, 2]
    const float* __restrict__ values,  // [num_pairs]
    int num_pairs,
    int vocab_size) {
  const int i = pair_number();
  if (i < num_pairs) logits[place_of(pairs, i, vocab_size)] = values[i];
}

extern "C" __global__ __launch_bounds__(MAX_THREADS) void ban(
    float* __restrict__ logits,     // [num_rows, vocab_size]
    const int* __restrict__ pairs,  // [num_pairs, 2]
    int num_pairs,
    int vocab_size) {
  const int i = pair_number();
  if (i < num_pairs) logits[place_of(pairs, i, vocab_size)] = negative_infinity();
}

/* check
vocab, block = 10, (32,)
logits = array([[1.0, -2.0, 3.0, 0, 5, 6, 7, 8, 9, 10]] * 3, dtype=f32)
pairs, values = array([[0, 1], [2, 2]]), array([0.5, 4.0], dtype=f32)
n, v = np.int32(2), np.int32(vocab)
add_bias((1,), block, (logits, pairs, values, n, v))
expect(logits[[0, 2], [1, 2]], [-1.5, 7.0], tolerance=0)
penalize((1,), block, (logits, pairs, values, n, v))
expect(logits[[0, 2], [1, 2]], [-0.75, 1.75], tolerance=0)
subtract((1,), block, (logits, pairs, values, n, v))
expect(logits[[0, 2], [1, 2]], [-1.25, -2.25], tolerance=0)
saved = empty(2, dtype=f32)
save_allowed((1,), block, (saved, logits, pairs, n, v))
forbid_rows((2, 1), block, (logits, array([0, 2]), v))
restore_allowed((1,), block, (logits, pairs, saved, n, v))
allowed = np.full((3, vocab), -np.inf)
allowed[0, 1], allowed[1], allowed[2, 2] = -1.25, [1, -2, 3, 0, 5, 6, 7, 8, 9, 10], -2.25
expect(logits, allowed, tolerance=0)
ban((1,), block, (logits, pairs, n, v))
allowed[[0, 2], [1, 2]] = -np.inf
expect(logits, allowed, tolerance=0)
*/
