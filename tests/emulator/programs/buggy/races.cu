// Kernels with a data race: in shared memory, inside a warp, and (with global_races) between blocks.
// The comment BUG(kernel) marks each line that takes part in the race; the error must name one of them.
#include <cuda_fp16.h>

// Tree sum whose first read is not ordered after the other warps' writes.
extern "C" __global__ void sum_missing_first_barrier(float* out, const float* in) {
    __shared__ float cells[128];
    cells[threadIdx.x] = in[threadIdx.x];  // BUG(sum_missing_first_barrier)
    for (int half = 64; half > 0; half /= 2) {
        if (threadIdx.x < half)
            cells[threadIdx.x] += cells[threadIdx.x + half];  // BUG(sum_missing_first_barrier)
        __syncthreads();
    }
    if (threadIdx.x == 0) out[0] = cells[0];
}

// Tree sum without the barrier between its steps.
extern "C" __global__ void sum_missing_step_barrier(float* out, const float* in) {
    __shared__ float cells[256];
    cells[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    for (int half = 128; half > 0; half /= 2)
        if (threadIdx.x < half)
            cells[threadIdx.x] += cells[threadIdx.x + half];  // BUG(sum_missing_step_barrier)
    __syncthreads();
    if (threadIdx.x == 0) out[0] = cells[0];
}

// Every warp leaves its result in one cell.
extern "C" __global__ void warps_share_one_cell(float* out, const float* in) {
    __shared__ float result;
    if (threadIdx.x % 32 == 0)
        result = in[threadIdx.x];  // BUG(warps_share_one_cell)
    __syncthreads();
    if (threadIdx.x == 0) out[0] = result;
}

// Reverses a row through shared memory, with no barrier at all.
extern "C" __global__ void reverse_missing_barrier(int* out, const int* in) {
    __shared__ int row[64];
    row[threadIdx.x] = in[threadIdx.x];  // BUG(reverse_missing_barrier)
    out[threadIdx.x] = row[63 - threadIdx.x];  // BUG(reverse_missing_barrier)
}

// Tiled product without the second barrier of the loop: a fast warp refills the tile too soon.
extern "C" __global__ void matmul_missing_second_barrier(float* c, const float* a, const float* b,
                                                         int k) {
    __shared__ float tile_a[16][16];
    __shared__ float tile_b[16][16];
    int x = threadIdx.x, y = threadIdx.y;
    float sum = 0.0f;
    for (int start = 0; start < k; start += 16) {
        tile_a[y][x] = a[y * k + start + x];
        tile_b[y][x] = b[(start + y) * 16 + x];  // BUG(matmul_missing_second_barrier)
        __syncthreads();
        for (int i = 0; i < 16; ++i)
            sum += tile_a[y][i] * tile_b[i][x];  // BUG(matmul_missing_second_barrier)
    }
    c[y * 16 + x] = sum;
}

// Padded transpose without its barrier.
extern "C" __global__ void transpose_missing_barrier(float* out, const float* in) {
    __shared__ float tile[16][17];
    int x = threadIdx.x, y = threadIdx.y;
    tile[y][x] = in[y * 16 + x];  // BUG(transpose_missing_barrier)
    out[y * 16 + x] = tile[x][y];  // BUG(transpose_missing_barrier)
}

// Last-warp reduction as written before independent thread scheduling.
extern "C" __global__ void warp_sum_without_syncwarp(float* out, const float* in) {
    __shared__ volatile float cells[64];
    int lane = threadIdx.x;
    cells[lane] = in[lane];
    cells[lane + 32] = in[lane + 32];
    __syncwarp();
    cells[lane] = cells[lane] + cells[lane + 32];  // BUG(warp_sum_without_syncwarp)
    cells[lane] = cells[lane] + cells[lane + 16];  // BUG(warp_sum_without_syncwarp)
    cells[lane] = cells[lane] + cells[lane + 8];  // BUG(warp_sum_without_syncwarp)
    if (lane == 0) out[0] = cells[0];
}

// __syncwarp of each half warp, while the exchange crosses the halves.
extern "C" __global__ void half_warp_sync_too_small(int* out, const int* in) {
    __shared__ int cells[32];
    int lane = threadIdx.x;
    unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    cells[lane] = 0;
    __syncwarp();
    cells[lane] = in[lane];  // BUG(half_warp_sync_too_small)
    __syncwarp(half);
    out[lane] = cells[lane ^ 16];  // BUG(half_warp_sync_too_small)
}

// Neighbouring halves: each thread reads the half beside the one it wrote.
extern "C" __global__ void half_neighbours(__half* out, const __half* in) {
    __shared__ __half cells[65];
    cells[threadIdx.x + 1] = in[0];
    __syncthreads();
    cells[threadIdx.x] = in[threadIdx.x];  // BUG(half_neighbours)
    out[threadIdx.x] = cells[threadIdx.x + 1];  // BUG(half_neighbours)
}

// Hillis-Steele scan in place: read and write of a step are not separated.
extern "C" __global__ void scan_missing_barrier(int* out, const int* in) {
    __shared__ int cells[128];
    int i = threadIdx.x;
    cells[i] = in[i];
    __syncthreads();
    for (int offset = 1; offset < 128; offset *= 2) {
        int left = i >= offset ? cells[i - offset] : 0;  // BUG(scan_missing_barrier)
        cells[i] += left;  // BUG(scan_missing_barrier)
        __syncthreads();
    }
    out[i] = cells[i];
}

// Shared histogram with plain increments.
extern "C" __global__ void shared_histogram_plain(int* out, const int* values) {
    __shared__ int bins[16];
    if (threadIdx.x < 16) bins[threadIdx.x] = 0;
    __syncthreads();
    bins[values[threadIdx.x] & 15]++;  // BUG(shared_histogram_plain)
    __syncthreads();
    if (threadIdx.x < 16) out[threadIdx.x] = bins[threadIdx.x];
}

// Atomic adds, but one thread reads the total before the barrier.
extern "C" __global__ void atomic_total_read_early(int* out, const int* in) {
    __shared__ int total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    atomicAdd(&total, in[threadIdx.x]);  // BUG(atomic_total_read_early)
    if (threadIdx.x == 0) out[0] = total;  // BUG(atomic_total_read_early)
}

// The usual broadcast helper, called twice: the second call overwrites the slot while others read.
__device__ float broadcast_first(float value) {
    __shared__ float slot;
    if (threadIdx.x == 0) slot = value;  // BUG(broadcast_slot_reused)
    __syncthreads();
    return slot;  // BUG(broadcast_slot_reused)
}
extern "C" __global__ void broadcast_slot_reused(float* out, const float* in) {
    float first = broadcast_first(in[0]);
    float second = broadcast_first(in[1]);
    out[threadIdx.x] = first + second + in[threadIdx.x];
}

// Two arrays carved from dynamic shared memory that overlap by one cell.
extern "C" __global__ void carved_overlap(float* out, const float* in, int n) {
    extern __shared__ float cells[];
    float* keys = cells;
    float* values = cells + n - 1;
    keys[threadIdx.x] = in[threadIdx.x];  // BUG(carved_overlap)
    values[threadIdx.x] = 1.0f;  // BUG(carved_overlap)
    __syncthreads();
    out[threadIdx.x] = keys[threadIdx.x] + values[threadIdx.x];
}

// Double buffer with one barrier a round, but the roles swap one round too late.
extern "C" __global__ void double_buffer_same_side(int* out, const int* in, int rounds) {
    __shared__ int buffer[2][64];
    int sum = 0;
    buffer[0][threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    for (int round = 0; round < rounds; ++round) {
        int side = (round / 2) % 2;
        sum += buffer[side][63 - threadIdx.x];  // BUG(double_buffer_same_side)
        buffer[((round + 1) / 2) % 2][threadIdx.x] = round;  // BUG(double_buffer_same_side)
        __syncthreads();
    }
    out[threadIdx.x] = sum;
}

// One row per warp in shared memory; the last column is read by the next warp without a barrier.
extern "C" __global__ void bytes_of_next_warp(signed char* out, const signed char* in) {
    __shared__ signed char row[65];
    row[threadIdx.x + 1] = 0;
    __syncthreads();
    row[threadIdx.x] = in[threadIdx.x];  // BUG(bytes_of_next_warp)
    __syncwarp();
    out[threadIdx.x] = row[threadIdx.x + 1];  // BUG(bytes_of_next_warp)
}

// Vector stores over cells that others read one by one.
extern "C" __global__ void vector_over_scalars(float* out, const float4* in) {
    __shared__ float4 packs[16];
    float* cells = reinterpret_cast<float*>(packs);
    cells[threadIdx.x] = 0.0f;
    __syncthreads();
    if (threadIdx.x < 16)
        packs[threadIdx.x] = in[threadIdx.x];  // BUG(vector_over_scalars)
    out[threadIdx.x] = cells[63 - threadIdx.x];  // BUG(vector_over_scalars)
}

// An atomic counter that one thread resets by a plain store.
extern "C" __global__ void reset_among_atomics(int* out, const int* in) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    if (in[threadIdx.x] > 40) atomicAdd(&count, 1);  // BUG(reset_among_atomics)
    if (threadIdx.x == 63) count = 0;  // BUG(reset_among_atomics)
    __syncthreads();
    out[threadIdx.x] = count;
}

// --- between blocks (global_races=True) ---

// Every block stores its sum in one cell.
extern "C" __global__ void blocks_share_one_cell(float* out, const float* in) {
    if (threadIdx.x == 0)
        out[0] = in[blockIdx.x];  // BUG(blocks_share_one_cell)
}

// Global histogram with plain increments.
extern "C" __global__ void global_histogram_plain(int* counts, const int* values) {
    counts[values[blockIdx.x * blockDim.x + threadIdx.x]] += 1;  // BUG(global_histogram_plain)
}

// Smoothing in place: the first cell of a block is read by the block on its left.
extern "C" __global__ void smooth_in_place(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float right = i + 1 < n ? x[i + 1] : 0.0f;  // BUG(smooth_in_place)
    __syncthreads();
    x[i] = 0.5f * (x[i] + right);  // BUG(smooth_in_place)
}

// Block sums, then "the last block" adds them, with a counter that is read plainly.
extern "C" __global__ void last_block_plain_counter(int* out, int* partial, int* counter) {
    partial[blockIdx.x] = blockIdx.x + 1;
    int done = *counter;  // BUG(last_block_plain_counter)
    *counter = done + 1;  // BUG(last_block_plain_counter)
    if (done + 1 == gridDim.x) {
        int sum = 0;
        for (int i = 0; i < gridDim.x; ++i) sum += partial[i];  // BUG(last_block_plain_counter)
        *out = sum;
    }
}

// Neighbours of one block exchange values through global memory without a barrier.
extern "C" __global__ void exchange_in_global(float* x, int n) {
    int i = threadIdx.x;
    x[i] = 2.0f * i;  // BUG(exchange_in_global)
    x[n + i] = x[(i + 1) % n];  // BUG(exchange_in_global)
}
