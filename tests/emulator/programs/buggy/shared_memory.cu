// Kernels that leave a shared or local array, or read shared memory that nobody wrote.
// Every kernel holds one bug; The comment BUG(kernel) marks the line that the emulator's error must name.

// Neighbour differences through a tile without a halo cell.
extern "C" __global__ void tile_past_end(float* out, const float* in) {
    __shared__ float tile[64];
    tile[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    float next = tile[threadIdx.x + 1];  // BUG(tile_past_end)
    out[threadIdx.x] = next - tile[threadIdx.x];
}

extern "C" __global__ void tile_before_start(float* out, const float* in) {
    __shared__ float tile[64];
    int i = threadIdx.x;
    tile[i] = in[i];
    __syncthreads();
    float previous = tile[i - 1];  // BUG(tile_before_start)
    out[i] = tile[i] - previous;
}

// The same through a pointer, where the array's type no longer tells its size.
__device__ float read_cell(const float* cells, int i) {
    return cells[i];  // BUG(tile_through_pointer)
}
extern "C" __global__ void tile_through_pointer(float* out, const float* in) {
    __shared__ float tile[64];
    tile[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = read_cell(tile, threadIdx.x + 1);
}

// Dynamic shared memory of n floats with one cell more used as a total.
extern "C" __global__ void dynamic_past_end(float* out, const float* in, int n) {
    extern __shared__ float cells[];
    cells[threadIdx.x] = in[threadIdx.x];
    if (threadIdx.x == 0)
        cells[n] = 0.0f;  // BUG(dynamic_past_end)
    __syncthreads();
    out[threadIdx.x] = cells[threadIdx.x];
}

// Two arrays carved from dynamic shared memory, sized in floats where doubles are due.
extern "C" __global__ void carved_past_end(double* out, int n) {
    extern __shared__ float weights[];
    double* sums = reinterpret_cast<double*>(weights + n);
    weights[threadIdx.x] = 1.0f;
    sums[threadIdx.x] = 2.0;  // BUG(carved_past_end)
    __syncthreads();
    out[threadIdx.x] = weights[threadIdx.x] + sums[threadIdx.x];
}

// Transpose whose column index runs one past the padded row (into the next row's cells).
extern "C" __global__ void transpose_past_row(float* out, const float* in) {
    __shared__ float tile[16][17];
    int x = threadIdx.x, y = threadIdx.y;
    tile[y][x + 2] = in[y * 16 + x];  // BUG(transpose_past_row)
    __syncthreads();
    out[y * 16 + x] = tile[x][y + 2];
}

// Shared histogram whose last value has no bin.
extern "C" __global__ void shared_bin_past_end(int* out, const int* values) {
    __shared__ int bins[32];
    if (threadIdx.x < 32) bins[threadIdx.x] = 0;
    __syncthreads();
    atomicAdd(&bins[values[threadIdx.x]], 1);  // BUG(shared_bin_past_end)
    __syncthreads();
    if (threadIdx.x < 32) out[threadIdx.x] = bins[threadIdx.x];
}

// float4 read of a shared row that ends inside the last pack.
extern "C" __global__ void shared_float4_past_end(float* out, const float* in) {
    __shared__ __align__(16) float row[30];
    if (threadIdx.x < 30) row[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < 8) {
        float4 pack = reinterpret_cast<const float4*>(row)[threadIdx.x];  // BUG(shared_float4_past_end)
        out[threadIdx.x] = pack.x + pack.y + pack.z + pack.w;
    }
}

// Top-4 of a row kept in a local array; the shift goes one place too far.
extern "C" __global__ void local_past_end(float* out, const float* in, int n) {
    float best[4] = {-1e30f, -1e30f, -1e30f, -1e30f};
    for (int i = 0; i < n; ++i) {
        int place = 4;
        while (place > 0 && in[i] > best[place - 1]) --place;
        for (int j = 4; j > place; --j)
            best[j] = best[j - 1];  // BUG(local_past_end)
        if (place < 4) best[place] = in[i];
    }
    for (int i = 0; i < 4; ++i) out[i] = best[i];
}

extern "C" __global__ void local_before_start(float* out, const float* in, int n) {
    float window[3] = {0.0f, 0.0f, 0.0f};
    for (int i = 0; i < n; ++i)
        window[(i - 1) % 3] += in[i];  // BUG(local_before_start)
    for (int i = 0; i < 3; ++i) out[i] = window[i];
}

// A helper that fills eight values is given a local array of four.
__device__ void fill_eight(float* values, float start) {
    for (int i = 0; i < 8; ++i) values[i] = start + i;
}
extern "C" __global__ void local_through_pointer(float* out, const float* in) {
    float values[4];
    fill_eight(values, in[0]);  // BUG(local_through_pointer)
    out[0] = values[0] + values[3];  // BUG(local_through_pointer)
}  // BUG(local_through_pointer)

// Shared counters nobody set to zero.
extern "C" __global__ void bins_not_cleared(int* out, const int* values) {
    __shared__ int bins[32];
    atomicAdd(&bins[values[threadIdx.x] & 31], 1);  // BUG(bins_not_cleared)
    __syncthreads();
    if (threadIdx.x < 32) out[threadIdx.x] = bins[threadIdx.x];
}

// Static: a running maximum that starts from whatever lay there.
extern "C" __global__ void maximum_not_set(float* out, const float* in, int n) {
    __shared__ float best;
    if (threadIdx.x == 0) {
        for (int i = 0; i < n; ++i)
            best = fmaxf(best, in[i]);  // BUG(maximum_not_set)
        out[0] = best;
    }
}

// Dynamic: the second half is read though only the first half was filled.
extern "C" __global__ void dynamic_half_filled(float* out, const float* in, int n) {
    extern __shared__ float cells[];
    cells[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < n; ++i)
        sum += cells[i];  // BUG(dynamic_half_filled)
    out[threadIdx.x] = sum;
}

// Tiled product of [m, k] and [k, n] whose tail columns are not zeroed.
extern "C" __global__ void matmul_tail_not_zeroed(float* c, const float* a, const float* b, int m,
                                                  int n, int k) {
    __shared__ float tile_a[8][8];
    __shared__ float tile_b[8][8];
    int row = blockIdx.y * 8 + threadIdx.y, column = blockIdx.x * 8 + threadIdx.x;
    float sum = 0.0f;
    for (int start = 0; start < k; start += 8) {
        int ka = start + threadIdx.x, kb = start + threadIdx.y;
        if (ka < k) tile_a[threadIdx.y][threadIdx.x] = row < m ? a[row * k + ka] : 0.0f;
        tile_b[threadIdx.y][threadIdx.x] = kb < k && column < n ? b[kb * n + column] : 0.0f;
        __syncthreads();
        for (int i = 0; i < 8; ++i) {
            float left = tile_a[threadIdx.y][i];  // BUG(matmul_tail_not_zeroed)
            sum += left * tile_b[i][threadIdx.x];
        }
        __syncthreads();
    }
    if (row < m && column < n) c[row * n + column] = sum;
}

// Block sum that reads 32 warp sums whatever the number of warps.
extern "C" __global__ void warp_sums_not_written(float* out, const float* in) {
    __shared__ float warp_sums[32];
    float value = in[threadIdx.x];
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x < 32) {
        float sum = warp_sums[threadIdx.x];  // BUG(warp_sums_not_written)
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (threadIdx.x == 0) out[0] = sum;
    }
}

// A double array laid right after an odd number of floats.
extern "C" __global__ void carved_misaligned(double* out, int n) {
    extern __shared__ float weights[];
    double* sums = reinterpret_cast<double*>(weights + n);
    weights[threadIdx.x] = 1.0f;
    sums[threadIdx.x] = 2.0;  // BUG(carved_misaligned)
    __syncthreads();
    out[threadIdx.x] = weights[threadIdx.x] + sums[threadIdx.x];
}

// Only the first block fills its table; shared memory does not outlive a block.
extern "C" __global__ void filled_by_first_block(float* out, const float* in) {
    __shared__ float table[32];
    if (blockIdx.x == 0) table[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[blockIdx.x * 32 + threadIdx.x] = table[31 - threadIdx.x];  // BUG(filled_by_first_block)
}
