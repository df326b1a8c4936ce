// The softmax of a block's rows between the two products: scores to weights, and the states of the
// rows, which live in registers. A thread has rows 16 r + lane / 4 + 8 half of each row tile r; its
// maxima are those of the whole row, its sums those of its own columns until a split is closed.
#pragma once

#include "attention_products.cuh"
#include "attention_state.cuh"
#include "reduce.cuh"

// What the attention of a row depends on besides its keys and values.
struct Rules {
  float score_scale;   // of q . k
  float capped_scale;  // SOFTCAP: of the tanh
  int window;          // WINDOW
};

struct States {
  float maximum[ROW_TILES][2];
  float sum[ROW_TILES][2];
  float values[ROW_TILES][WARP_DIM_TILES][4];
};

__device__ __forceinline__ void clear(States& states) {
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      states.maximum[r][half] = minus_infinity();
      states.sum[r][half] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < WARP_DIM_TILES; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) states.values[r][n][j] = 0.0f;
    }
  }
}

__device__ __forceinline__ int row_of(int r, int half) {
  return 16 * r + threadIdx.x % 32 / 4 + 8 * half;
}

// Over the four threads that share a row.
__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 1));
  return fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 2));
}
__device__ __forceinline__ float quad_sum(float value) {
  value = __fadd_rn(value, __shfl_xor_sync(ALL_LANES, value, 1));
  return __fadd_rn(value, __shfl_xor_sync(ALL_LANES, value, 2));
}

// The row tiles with a key in the KV tile that begins at `first`. The same for all threads.
__device__ __forceinline__ unsigned active_row_tiles(const Shared& shared, int num_row_tiles,
                                                     int first, const Rules& rules) {
  unsigned active = 0;
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
    if (r >= num_row_tiles) continue;
    bool any = first <= shared.position[16 * r + 15];
    if constexpr (WINDOW == 1) {
      any = any && first + KV_TILE - 1 > shared.position[16 * r] - rules.window;
    }
    active |= unsigned(any) << r;
  }
  return active;
}

// Products q . k become scores, -inf where the key does not count; the maximum of each row over the
// warp's slice goes to shared memory.
__device__ __forceinline__ void finish_scores(float (&scores)[SLICE_TILES][4], Shared& shared,
                                              int r, int first, const Rules& rules) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  bool masked = first + KV_TILE - 1 > shared.position[16 * r];
  if constexpr (WINDOW == 1) {
    masked = masked || first <= shared.position[16 * r + 15] - rules.window;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_of(r, half);
    const int last = masked ? shared.position[row] : 0;
    float maximum = minus_infinity();
#pragma unroll
    for (int n = 0; n < SLICE_TILES; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = scores[n][2 * half + e];
        score = __fmul_rn(score, rules.score_scale);
        if constexpr (SOFTCAP == 1) score = __fmul_rn(tanhf(score), rules.capped_scale);
        if (masked) {
          const int position = first + warp * SLICE + 8 * n + 2 * (lane % 4) + e;
          bool counts = position <= last;
          if constexpr (WINDOW == 1) counts = counts && position > last - rules.window;
          if (!counts) score = minus_infinity();
        }
        maximum = fmaxf(maximum, score);
      }
    }
    maximum = quad_max(maximum);
    if (lane % 4 == 0) shared.row_max[warp * ROWS + row] = maximum;
  }
}

// Scores become weights in shared memory; the state moves on to the tile's maximum.
__device__ __forceinline__ void weigh(const float (&scores)[SLICE_TILES][4], Shared& shared,
                                      States& states, int r) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_of(r, half);
    float maximum = states.maximum[r][half];
#pragma unroll
    for (int w = 0; w < WARPS; ++w) maximum = fmaxf(maximum, shared.row_max[w * ROWS + row]);
    const float base = base_of(maximum);
    const float kept = exp2f(__fsub_rn(states.maximum[r][half], base));
    states.maximum[r][half] = maximum;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < SLICE_TILES; ++n) {
      const float first = exp2f(__fsub_rn(scores[n][2 * half], base));
      const float second = exp2f(__fsub_rn(scores[n][2 * half + 1], base));
      sum = __fadd_rn(sum, __fadd_rn(first, second));
      Pack<T, 2> pair;
      pair.at[0] = round_to<T>(first);
      pair.at[1] = round_to<T>(second);
      store_pack<2>(shared.weights + row * WEIGHT_PITCH + warp * SLICE + 8 * n + 2 * (lane % 4), 0,
                    pair);
    }
    states.sum[r][half] = __fmaf_rn(states.sum[r][half], kept, sum);
#pragma unroll
    for (int n = 0; n < WARP_DIM_TILES; ++n) {
      states.values[r][n][2 * half] = __fmul_rn(states.values[r][n][2 * half], kept);
      states.values[r][n][2 * half + 1] = __fmul_rn(states.values[r][n][2 * half + 1], kept);
    }
  }
}

// A split is done: its state joins the state of the splits before it, and begins anew. The sum of a
// row is brought together here; it is the same in all of a row's threads from then on.
__device__ __forceinline__ void close_split(Shared& shared, States& split, States& merged,
                                            int num_row_tiles) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
    if (r >= num_row_tiles) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(split.sum[r][half]);
      if (lane % 4 == 0) shared.row_sum[threadIdx.x / 32 * ROWS + row_of(r, half)] = sum;
    }
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
    if (r >= num_row_tiles) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(r, half);
      float sum = shared.row_sum[row];
#pragma unroll
      for (int w = 1; w < WARPS; ++w) sum = __fadd_rn(sum, shared.row_sum[w * ROWS + row]);
      const Scales scales = merge_maxima(merged.maximum[r][half], split.maximum[r][half]);
      merged.sum[r][half] = merge_sums(merged.sum[r][half], sum, scales);
#pragma unroll
      for (int n = 0; n < WARP_DIM_TILES; ++n) {
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; ++j) {
          float& value = merged.values[r][n][j];
          value = merge_sums(value, split.values[r][n][j], scales);
        }
      }
    }
  }
  clear(split);
}

__device__ __forceinline__ void write_partial(float* values, float* sums, const States& states,
                                              long long first, int num_rows) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row_of(r, half) >= num_rows) continue;
      const long long row = first + row_of(r, half);
      if (warp == 0 && lane % 4 == 0) {
        store_pack<2>(sums, row, Pack<float, 2>{states.maximum[r][half], states.sum[r][half]});
      }
#pragma unroll
      for (int n = 0; n < WARP_DIM_TILES; ++n) {
        if (!has_dim_tile(n)) continue;
        const int column = (n * WARPS + warp) * 8 + 2 * (lane % 4);
        const Pack<float, 2> pair{states.values[r][n][2 * half], states.values[r][n][2 * half + 1]};
        store_pack<2>(values + row * HEAD_DIM + column, 0, pair);
      }
    }
  }
}

// `out`: the sequence's first new token, query head 0 of the KV head. `sinks`: of that head on.
__device__ __forceinline__ void write_out(T* out, const States& states, const Work& work,
                                          const T* sinks, int group, int num_q_heads) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row_of(r, half) >= work.num_rows) continue;
      const int number = work.first_row + row_of(r, half);
      const int head = number % group;
      const float scale = output_scale(states.maximum[r][half], states.sum[r][half], sinks, head);
      T* row = out + ((long long)(number / group) * num_q_heads + head) * HEAD_DIM;
#pragma unroll
      for (int n = 0; n < WARP_DIM_TILES; ++n) {
        if (!has_dim_tile(n)) continue;
        Pack<T, 2> pair;
        pair.at[0] = finished(states.values[r][n][2 * half], scale);
        pair.at[1] = finished(states.values[r][n][2 * half + 1], scale);
        store_pack<2>(row + (n * WARPS + warp) * 8 + 2 * (lane % 4), 0, pair);
      }
    }
  }
}
