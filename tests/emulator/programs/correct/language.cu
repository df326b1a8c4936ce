// Correct kernels around the language: templates, macros, structs, constant and global variables, recursion,
// vectors, halves, printf. None may be flagged.
#include <cuda_fp16.h>

template <typename T, int FACTOR>
__global__ void scale_by(T* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = x[i] * T(FACTOR);
}

#define MAKE_UNARY(name, expression)                                     \
    extern "C" __global__ void name(float* out, const float* in, int n) { \
        int i = blockIdx.x * blockDim.x + threadIdx.x;                   \
        if (i < n) {                                                     \
            float x = in[i];                                             \
            out[i] = expression;                                         \
        }                                                                \
    }
MAKE_UNARY(square, x* x)
MAKE_UNARY(negate, -x)
#undef MAKE_UNARY

struct Affine {
    float scale;
    float offset;
    int n;
    __device__ float operator()(float x) const { return scale * x + offset; }
};

// A struct by value, as the frame passes it.
extern "C" __global__ void affine(float* out, const float* in, Affine map) {
    int i = threadIdx.x;
    if (i < map.n) out[i] = map(in[i]);
}

__constant__ float taps[4] = {0.5f, 0.25f, 0.125f, 0.125f};
__device__ int served = 0;

extern "C" __global__ void filter(float* out, const float* in, int n) {
    int i = threadIdx.x;
    if (i >= n) return;
    float sum = 0.0f;
    for (int tap = 0; tap < 4; ++tap) sum += taps[tap] * (i >= tap ? in[i - tap] : 0.0f);
    out[i] = sum;
}

// Tickets from a counter that lives in the module.
extern "C" __global__ void tickets(int* out) {
    out[threadIdx.x] = atomicAdd(&served, 1) % 64;
}

__device__ int fibonacci(int n) {
    return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2);
}

extern "C" __global__ void recursion(int* out) {
    out[threadIdx.x] = fibonacci(threadIdx.x);
}

// One line from one thread.
extern "C" __global__ void hello(int value) {
    if (threadIdx.x == 3 && blockIdx.x == 1) printf("block %d says %d and %.2f\n", blockIdx.x, value, 0.25);
}

// 16-byte packs with a scalar tail.
extern "C" __global__ void copy_packs(float* out, const float* in, int n) {
    int packs = n / 4;
    for (int i = threadIdx.x; i < packs; i += blockDim.x)
        reinterpret_cast<float4*>(out)[i] = reinterpret_cast<const float4*>(in)[i];
    for (int i = 4 * packs + threadIdx.x; i < n; i += blockDim.x) out[i] = in[i];
}

// y = a * x + y by half2, which rounds once.
extern "C" __global__ void half2_axpy(__half2* y, const __half2* x, float a) {
    y[threadIdx.x] = __hfma2(__float2half2_rn(a), x[threadIdx.x], y[threadIdx.x]);
}

// Neighbouring halves of one word, written by different threads.
extern "C" __global__ void half_neighbours(__half* out, const __half* in) {
    __shared__ __half row[64];
    row[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = __hadd(row[threadIdx.x], row[threadIdx.x ^ 1]);
}

struct Record {
    double key;
    int id;
    short flags[3];
};

// Whole records by assignment, and through shared memory.
extern "C" __global__ void reverse_records(Record* out, const Record* in) {
    __shared__ Record cells[16];
    cells[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = cells[15 - threadIdx.x];
}

template <int WIDTH>
__device__ int rotate_in_tile(int value) {
    __shared__ int cells[WIDTH];
    __syncthreads();
    cells[threadIdx.x] = value;
    __syncthreads();
    return cells[(threadIdx.x + 1) % WIDTH];
}

// A shared array inside a device function template, used twice.
extern "C" __global__ void rotate_twice(int* out, const int* in) {
    out[threadIdx.x] = rotate_in_tile<32>(rotate_in_tile<32>(in[threadIdx.x]));
}

// Local arrays, a lambda, and shifts up to the last bit.
extern "C" __global__ void sort_four(unsigned* out, const unsigned* in) {
    unsigned values[4];
    for (int i = 0; i < 4; ++i) values[i] = in[4 * threadIdx.x + i];
    auto order = [&](int i, int j) {
        if (values[j] < values[i]) {
            unsigned kept = values[i];
            values[i] = values[j];
            values[j] = kept;
        }
    };
    order(0, 1); order(2, 3); order(0, 2); order(1, 3); order(1, 2);
    for (int i = 0; i < 4; ++i) out[4 * threadIdx.x + i] = values[i] ^ (1u << (28 + i));
}

// Paged gather with 64-bit offsets; padding (-1) is skipped.
extern "C" __global__ void paged_gather(float* __restrict__ out, const float* __restrict__ cache,
                                        const long long* __restrict__ slots, int width) {
    long long slot = slots[blockIdx.x];
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        out[(long long)blockIdx.x * width + i] = slot < 0 ? 0.0f : cache[slot * width + i];
}
