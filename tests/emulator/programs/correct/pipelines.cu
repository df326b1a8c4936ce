// Correct kernels around cp.async, ldmatrix and mma, through cuda/ptx.cuh. None may be flagged.
#include <cuda_fp16.h>

#include "ptx.cuh"

// Sums `stages` rows of 256 floats with two buffers, one being filled while the other is read.
extern "C" __global__ void double_buffered_sum(float* out, const float* in, int stages) {
    __shared__ __align__(16) float tile[2][256];
    int start = 4 * threadIdx.x;
    copy_async<16>(&tile[0][start], &in[start]);
    copy_async_commit();
    float sum = 0.0f;
    for (int stage = 0; stage < stages; ++stage) {
        if (stage + 1 < stages) {
            copy_async<16>(&tile[(stage + 1) % 2][start], &in[256 * (stage + 1) + start]);
            copy_async_commit();
            copy_async_wait<1>();
        } else {
            copy_async_wait<0>();
        }
        __syncthreads();
        sum += tile[stage % 2][255 - threadIdx.x];
        __syncthreads();
    }
    out[threadIdx.x] = sum;
}

// Three stages, one barrier a round: the buffer that is refilled was read a whole round ago.
extern "C" __global__ void three_stage_sum(float* out, const float* in, int stages) {
    __shared__ __align__(16) float tile[3][256];
    int start = 4 * threadIdx.x;
    for (int stage = 0; stage < 2; ++stage) {
        if (stage < stages) copy_async<16>(&tile[stage][start], &in[256 * stage + start]);
        copy_async_commit();
    }
    float sum = 0.0f;
    for (int stage = 0; stage < stages; ++stage) {
        copy_async_wait<1>();
        __syncthreads();
        sum += tile[stage % 3][255 - threadIdx.x];
        int next = stage + 2;
        if (next < stages) copy_async<16>(&tile[next % 3][start], &in[256 * next + start]);
        copy_async_commit();
    }
    out[threadIdx.x] = sum;
}

// A tail that is no multiple of 16 bytes, filled up with zeros.
extern "C" __global__ void zero_filled_tail(float* out, const float* in, int n) {
    __shared__ __align__(16) float tile[128];
    int start = 4 * threadIdx.x, left = n - start;
    int bytes = left <= 0 ? 0 : (left < 4 ? 4 * left : 16);
    copy_async_or_zero<16>(&tile[start], bytes > 0 ? in + start : in, bytes);
    copy_async_wait_all();
    __syncthreads();
    for (int i = threadIdx.x; i < 128; i += 32) out[i] = tile[i];
}

// Each thread waits for its own copy and reads only that: no barrier is due.
extern "C" __global__ void own_copies_only(float* out, const float* in) {
    __shared__ __align__(16) float tile[32];
    copy_async<4>(&tile[threadIdx.x], &in[threadIdx.x]);
    copy_async_commit();
    copy_async_wait<0>();
    out[threadIdx.x] = 2.0f * tile[threadIdx.x];
}

// One warp: c [16, 8] = a [16, 16] b [8, 16]^T by ldmatrix and mma, rows padded to 24 halves.
extern "C" __global__ void matrix_product(float* c, const __half* a, const __half* b) {
    __shared__ __align__(16) __half tile_a[16 * 24];
    __shared__ __align__(16) __half tile_b[8 * 24];
    int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) tile_a[(i / 16) * 24 + i % 16] = a[i];
    for (int i = lane; i < 128; i += 32) tile_b[(i / 16) * 24 + i % 16] = b[i];
    __syncwarp();
    unsigned left[4], right[2];
    ldmatrix_x4(left, &tile_a[(lane % 16) * 24 + (lane / 16) * 8]);
    ldmatrix_x2(right, &tile_b[(lane % 8) * 24 + ((lane / 8) % 2) * 8]);
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    mma_f16(sums, left, right);
    int row = lane / 4, column = 2 * (lane % 4);
    c[row * 8 + column] = sums[0];
    c[row * 8 + column + 1] = sums[1];
    c[(row + 8) * 8 + column] = sums[2];
    c[(row + 8) * 8 + column + 1] = sums[3];
}
