// Kernels that misuse cp.async and ldmatrix, through the wrappers of cuda/ptx.cuh.
// Every kernel holds one bug; The comment BUG(kernel) marks the lines that the emulator's error may name.
#include <cuda_fp16.h>

#include "ptx.cuh"

// Reads the tile with no wait at all.
extern "C" __global__ void copy_without_wait(float* out, const float* in) {
    __shared__ __align__(16) float tile[128];
    copy_async<16>(&tile[4 * threadIdx.x], &in[4 * threadIdx.x]);
    copy_async_commit();
    __syncthreads();
    float value = tile[127 - threadIdx.x];  // BUG(copy_without_wait)
    out[threadIdx.x] = value;
}

// Two stages in flight; the wait lets the stage that is read stay in flight.
extern "C" __global__ void wait_for_wrong_group(float* out, const float* in) {
    __shared__ __align__(16) float tile[2][128];
    copy_async<16>(&tile[0][4 * threadIdx.x], &in[4 * threadIdx.x]);
    copy_async_commit();
    copy_async<16>(&tile[1][4 * threadIdx.x], &in[128 + 4 * threadIdx.x]);
    copy_async_commit();
    copy_async_wait<1>();
    __syncthreads();
    float first = tile[0][127 - threadIdx.x];
    float second = tile[1][127 - threadIdx.x];  // BUG(wait_for_wrong_group)
    out[threadIdx.x] = first + second;
}

// wait_group does not wait for copies that were never committed.
extern "C" __global__ void wait_without_commit(float* out, const float* in) {
    __shared__ __align__(16) float tile[128];
    copy_async<16>(&tile[4 * threadIdx.x], &in[4 * threadIdx.x]);
    copy_async_wait<0>();
    __syncthreads();
    float value = tile[127 - threadIdx.x];  // BUG(wait_without_commit)
    out[threadIdx.x] = value;
}

// The wait covers a thread's own copies; those of the others need a barrier after it.
extern "C" __global__ void wait_without_barrier(float* out, const float* in) {
    __shared__ __align__(16) float tile[256];
    for (int i = threadIdx.x; i < 256; i += 64) tile[i] = 0.0f;
    __syncthreads();
    copy_async<16>(&tile[4 * threadIdx.x], &in[4 * threadIdx.x]);  // BUG(wait_without_barrier)
    copy_async_commit();
    copy_async_wait<0>();  // BUG(wait_without_barrier)
    out[threadIdx.x] = tile[255 - threadIdx.x];  // BUG(wait_without_barrier)
}

// A barrier before the wait in place of after it.
extern "C" __global__ void barrier_before_wait(float* out, const float* in) {
    __shared__ __align__(16) float tile[256];
    copy_async<16>(&tile[4 * threadIdx.x], &in[4 * threadIdx.x]);
    copy_async_commit();
    __syncthreads();
    copy_async_wait<0>();
    out[threadIdx.x] = tile[255 - threadIdx.x];  // BUG(barrier_before_wait)
}

// The next stage is fetched into the buffer that other warps still read.
extern "C" __global__ void refill_while_read(float* out, const float* in, int stages) {
    __shared__ __align__(16) float tile[256];
    float sum = 0.0f;
    for (int stage = 0; stage < stages; ++stage) {
        const float* source = in + 256 * stage + 4 * threadIdx.x;
        copy_async<16>(&tile[4 * threadIdx.x], source);  // BUG(refill_while_read)
        copy_async_commit();
        copy_async_wait<0>();  // BUG(refill_while_read)
        __syncthreads();
        sum += tile[255 - threadIdx.x];  // BUG(refill_while_read)
    }
    out[threadIdx.x] = sum;
}

// The tail of a row is not 16 bytes long, and the copy does not say so.
extern "C" __global__ void async_source_past_end(float* out, const float* in, int n) {
    __shared__ __align__(16) float tile[128];
    int start = 4 * threadIdx.x;
    if (start < n)
        copy_async<16>(&tile[start], &in[start]);  // BUG(async_source_past_end)
    copy_async_wait_all();
    __syncthreads();
    if (threadIdx.x < n) out[threadIdx.x] = tile[threadIdx.x];
}

// One pack more than the tile holds.
extern "C" __global__ void async_destination_past_end(float* out, const float* in) {
    __shared__ __align__(16) float tile[120];
    copy_async<16>(&tile[4 * threadIdx.x], &in[4 * threadIdx.x]);  // BUG(async_destination_past_end)
    copy_async_wait_all();
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x];
}

// Rows of 30 floats: only every second row starts at 16 bytes.
extern "C" __global__ void async_source_misaligned(float* out, const float* in, int width) {
    __shared__ __align__(16) float tile[4][28];
    if (threadIdx.x < 4)
        copy_async<16>(&tile[threadIdx.x][0], in + threadIdx.x * width);  // BUG(async_source_misaligned)
    copy_async_wait_all();
    __syncthreads();
    if (threadIdx.x < 4) out[threadIdx.x] = tile[threadIdx.x][0];
}

// Nothing is read, but the address of an instruction of 16 bytes must be a multiple of 16.
extern "C" __global__ void async_zeros_misaligned(float* out, const float* in) {
    __shared__ __align__(16) float tile[128];
    copy_async_or_zero<16>(&tile[4 * threadIdx.x], in + 1, 0);  // BUG(async_zeros_misaligned)
    copy_async_wait_all();
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x];
}

// A plain store into a cell whose copy is still in flight.
extern "C" __global__ void store_under_copy(float* out, const float* in) {
    __shared__ __align__(16) float tile[128];
    copy_async<16>(&tile[4 * threadIdx.x], &in[4 * threadIdx.x]);
    copy_async_commit();
    tile[4 * threadIdx.x] = 0.0f;  // BUG(store_under_copy)
    copy_async_wait<0>();
    __syncthreads();
    out[threadIdx.x] = tile[4 * threadIdx.x];
}

__device__ void fill_tile(__half* tile, int count, const __half* in) {
    for (int i = threadIdx.x; i < count; i += 32) tile[i] = in[i % 256];
    __syncwarp();
}

// The row address is computed with the wrong stride: matrices 2 and 3 start past the tile.
extern "C" __global__ void ldmatrix_past_end(unsigned* out, const __half* in) {
    __shared__ __align__(16) __half tile[16 * 16];
    fill_tile(tile, 256, in);
    int lane = threadIdx.x;
    unsigned matrices[4];
    ldmatrix_x4(matrices, &tile[(lane % 16) * 16 + (lane / 16) * 256]);  // BUG(ldmatrix_past_end)
    for (int i = 0; i < 4; ++i) out[4 * lane + i] = matrices[i];
}

// Rows padded by 4 halves start at multiples of 8 bytes; ldmatrix needs 16.
extern "C" __global__ void ldmatrix_misaligned(unsigned* out, const __half* in) {
    __shared__ __align__(16) __half tile[16 * 20];
    fill_tile(tile, 320, in);
    int lane = threadIdx.x;
    unsigned matrices[4];
    ldmatrix_x4(matrices, &tile[(lane % 16) * 20 + (lane / 16) * 8]);  // BUG(ldmatrix_misaligned)
    for (int i = 0; i < 4; ++i) out[4 * lane + i] = matrices[i];
}

// Only half of the warp gets to ldmatrix, which is a matter of all 32 lanes.
extern "C" __global__ void ldmatrix_half_warp(unsigned* out, const __half* in) {
    __shared__ __align__(16) __half tile[16 * 16];
    fill_tile(tile, 256, in);
    int lane = threadIdx.x;
    unsigned matrices[2] = {0u, 0u};
    if (lane < 16)
        ldmatrix_x2(matrices, &tile[lane * 16]);  // BUG(ldmatrix_half_warp)
    __syncwarp();  // BUG(ldmatrix_half_warp)
    for (int i = 0; i < 2; ++i) out[2 * lane + i] = matrices[i];
}

// The fragment is read before the tile's last rows are there.
extern "C" __global__ void ldmatrix_under_copy(unsigned* out, const __half* in) {
    __shared__ __align__(16) __half tile[16 * 16];
    int lane = threadIdx.x;
    copy_async<16>(&tile[8 * lane], &in[8 * lane]);
    copy_async_commit();
    __syncwarp();
    unsigned matrices[4];
    ldmatrix_x4(matrices, &tile[(lane % 16) * 16 + (lane / 16) * 8]);  // BUG(ldmatrix_under_copy)
    copy_async_wait<0>();
    for (int i = 0; i < 4; ++i) out[4 * lane + i] = matrices[i];
}
