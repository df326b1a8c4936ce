// Activations, element by element.
//
//   silu_mul:  out = silu(gate) * up,   silu(x) = x / (1 + exp(-x))
//   gelu_mul:  out = gelu(gate) * up,   gelu in its tanh form
//   gelu:      out = gelu(x),           in the form that GELU_ERF says
//   relu:      out = max(x, 0), and NaN where x is
//
//   gelu, tanh form: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), written as
//                    x / (1 + exp(-2 sqrt(2 / pi) * (x + 0.044715 x^3))), which is the same
//                    and exact in the tail
//   gelu, erf form:  x / 2 * erfc(-x / sqrt(2))
//
// Arrays: silu_mul, gelu_mul: out T [num_rows, n]; gate_up T [num_rows, 2 n], gate first, out
// overlaps nothing. gelu, relu: out, x T [count]; out may be x itself. Contiguous, each aligned to
// 16 bytes.
//
// Grid: silu_mul, gelu_mul: (num_rows, any), the second for as many blocks as share a row; gelu,
// relu: (any). Block: any up to 256 threads. Threads take 16 bytes of the output at a time, so that
// ceil(n sizeof(T) / 16 / threads) blocks are one such step each; where n is no multiple of 16
// bytes, rows move by element.
//
// Rounding: float throughout, exp and erfc to 2 ulp (never the fast forms); rounded to T once.
//
// Defines: DTYPE; GELU_ERF = 0 (default, tanh) or 1.
//
// Cost, bytes: 3 n sizeof(T) a row for the gated ones, 2 sizeof(T) an element for the others. Bound
// by memory.
#include "common.cuh"

#ifndef GELU_ERF
#define GELU_ERF 0
#endif
static_assert(GELU_ERF == 0 || GELU_ERF == 1, "GELU_ERF is 0 or 1");

constexpr int MAX_THREADS = 256;

__device__ __forceinline__ float silu_of(float x) {
  return __fdiv_rn(x, __fadd_rn(1.0f, expf(-x)));
}

__device__ __forceinline__ float gelu_tanh_of(float x) {
  const float cube = __fmul_rn(__fmul_rn(x, x), x);
  const float twice_root = 1.5957691216057308f;  // 2 sqrt(2 / pi)
  const float inner = __fmul_rn(twice_root, __fmaf_rn(0.044715f, cube, x));
  return __fdiv_rn(x, __fadd_rn(1.0f, expf(-inner)));
}

__device__ __forceinline__ float gelu_erf_of(float x) {
  return __fmul_rn(__fmul_rn(0.5f, x), erfcf(__fmul_rn(-0.70710678118654752f, x)));
}

__device__ __forceinline__ float gelu_of(float x) {
  return GELU_ERF == 1 ? gelu_erf_of(x) : gelu_tanh_of(x);
}

__device__ __forceinline__ float relu_of(float x) { return x < 0.0f ? 0.0f : x; }

template <int N, float (*ACTIVATION)(float)>
__device__ __forceinline__ void gated_row(T* out, const T* gate, const T* up, int n) {
  const int step = gridDim.y * blockDim.x;
#pragma unroll 1
  for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < n / N; i += step) {
    const Pack<T, N> g = load_pack<N>(gate, i);
    const Pack<T, N> u = load_pack<N>(up, i);
    Pack<T, N> y;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      y.at[j] = round_to<T>(__fmul_rn(ACTIVATION(to_float(g.at[j])), to_float(u.at[j])));
    }
    store_pack<N>(out, i, y);
  }
}

template <float (*ACTIVATION)(float)>
__device__ __forceinline__ void gated(T* out, const T* gate_up, int n) {
  out += (long long)blockIdx.x * n;
  const T* gate = gate_up + (long long)blockIdx.x * 2 * n;
  if (rows_are_aligned<T>(n)) {
    gated_row<WIDEST<T>, ACTIVATION>(out, gate, gate + n, n);
  } else {
    gated_row<1, ACTIVATION>(out, gate, gate + n, n);
  }
}

// The last count % WIDEST elements go one by one.
template <float (*ACTIVATION)(float)>
__device__ __forceinline__ void elementwise(T* out, const T* x, long long count) {
  constexpr int N = WIDEST<T>;
  const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  const long long step = (long long)gridDim.x * blockDim.x;
#pragma unroll 1
  for (long long i = first; i < count / N; i += step) {
    Pack<T, N> pack = load_pack<N>(x, i);
#pragma unroll
    for (int j = 0; j < N; ++j) pack.at[j] = round_to<T>(ACTIVATION(to_float(pack.at[j])));
    store_pack<N>(out, i, pack);
  }
#pragma unroll 1
  for (long long i = count / N * N + first; i < count; i += step) {
    out[i] = round_to<T>(ACTIVATION(to_float(x[i])));
  }
}

extern "C" __global__ __launch_bounds__(MAX_THREADS) void silu_mul(
    T* __restrict__ out,            // [num_rows, n]
    const T* __restrict__ gate_up,  // [num_rows, 2 n]
    int n) {
  gated<silu_of>(out, gate_up, n);
}

extern "C" __global__ __launch_bounds__(MAX_THREADS) void gelu_mul(
    T* __restrict__ out,            // [num_rows, n]
    const T* __restrict__ gate_up,  // [num_rows, 2 n]
    int n) {
  gated<gelu_tanh_of>(out, gate_up, n);
}

extern "C" __global__ __launch_bounds__(MAX_THREADS) void gelu(
    T* out,      // [count], may be x
    const T* x,  // [count]
    long long count) {
  elementwise<gelu_of>(out, x, count);
}

extern "C" __global__ __launch_bounds__(MAX_THREADS) void relu(
    T* out,      // [count], may be x
    const T* x,  // [count]
    long long count) {
  elementwise<relu_of>(out, x, count);
}

/* check -DDTYPE=f32
rows, n = 3, 37
gate_up = normal(rows, 2 * n)
gate, up = np.split(np.float64(gate_up), 2, axis=1)
out = empty(rows, n)
silu_mul((rows, 2), (32,), (out, gate_up, np.int32(n)))
expect(out, gate / (1 + np.exp(-gate)) * up)

def tanh_form(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

out = empty(rows, n)
gelu_mul((rows, 1), (32,), (out, gate_up, np.int32(n)))
expect(out, tanh_form(gate) * up)

x = 3 * normal(1001)
out = empty(1001)
gelu((2,), (96,), (out, x, np.int64(x.size)))
expect(out, tanh_form(np.float64(x)))

x[::7] = np.nan
out = array(x)
relu((1,), (256,), (out, out, np.int64(x.size)))  # in place
expect(out, np.where(np.float64(x) < 0, 0, x), tolerance=0)
*/

/* check -DDTYPE=f16 -DGELU_ERF=1
from math import erf

x = 3 * normal(1001)
out = empty(1001)
gelu((2,), (96,), (out, x, np.int64(x.size)))
expect(out, [v / 2 * (1 + erf(v / np.sqrt(2))) for v in np.float64(x)])
*/
