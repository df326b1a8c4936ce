// Correct kernels around blocks: barriers, tiles, shapes, grids, kinds of memory. None may be flagged.

__device__ float warp_total(float value) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

// The classic tree sum, for blocks of a power of two.
extern "C" __global__ void tree_sum(float* out, const float* in) {
    extern __shared__ float cells[];
    cells[threadIdx.x] = in[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) cells[threadIdx.x] += cells[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = cells[0];
}

// Sum of any block size up to 1024: warps first, then the first warp. Missing lanes count as exited.
extern "C" __global__ void block_sum(int* out, const int* in) {
    __shared__ int warp_sums[32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int warps = (blockDim.x + 31) / 32, lanes = min(32, (int)blockDim.x - 32 * warp);
    unsigned mask = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1u;
    int value = in[threadIdx.x];
    for (int offset = 16; offset > 0; offset /= 2) {
        int source = lane + offset;
        int other = __shfl_sync(mask, value, source < lanes ? source : lane);
        if (source < lanes) value += other;
    }
    if (lane == 0) warp_sums[warp] = value;
    __syncthreads();
    if (threadIdx.x == 0) {
        int sum = 0;
        for (int i = 0; i < warps; ++i) sum += warp_sums[i];
        out[0] = sum;
    }
}

// Sum of 64 by the last warp with __syncwarp between the steps.
extern "C" __global__ void warp_synchronous_sum(float* out, const float* in) {
    __shared__ volatile float cells[64];
    int lane = threadIdx.x;
    cells[lane] = in[lane];
    cells[lane + 32] = in[lane + 32];
    __syncwarp();
    for (int half = 32; half > 0; half /= 2) {
        float sum = cells[lane] + cells[lane + half];
        __syncwarp();
        if (lane < half) cells[lane] = sum;
        __syncwarp();
    }
    if (lane == 0) out[0] = cells[0];
}

// Warps without work leave before the barrier; the rest go on among themselves.
extern "C" __global__ void early_exit_warps(int* out, const int* in, int n) {
    __shared__ int cells[256];
    if (threadIdx.x >= n) return;
    cells[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = cells[n - 1 - threadIdx.x];
}

// Linear index from a 3-D grid of 3-D blocks.
extern "C" __global__ void index_3d(int* out, int depth, int height, int width) {
    int x = blockIdx.x * blockDim.x + threadIdx.x;
    int y = blockIdx.y * blockDim.y + threadIdx.y;
    int z = blockIdx.z * blockDim.z + threadIdx.z;
    if (x < width && y < height && z < depth)
        out[((long long)z * height + y) * width + x] = 10000 * z + 100 * y + x;
}

// A grid smaller than the data.
extern "C" __global__ void grid_stride_scale(float* x, float factor, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) x[i] *= factor;
}

// Transpose of [rows, columns] through a tile with one padded column.
extern "C" __global__ void transpose(float* out, const float* in, int rows, int columns) {
    __shared__ float tile[16][17];
    int column = blockIdx.x * 16 + threadIdx.x, row = blockIdx.y * 16 + threadIdx.y;
    if (row < rows && column < columns) tile[threadIdx.y][threadIdx.x] = in[row * columns + column];
    __syncthreads();
    int out_column = blockIdx.y * 16 + threadIdx.x, out_row = blockIdx.x * 16 + threadIdx.y;
    if (out_row < columns && out_column < rows)
        out[out_row * rows + out_column] = tile[threadIdx.x][threadIdx.y];
}

// Tiled product of [m, k] and [k, n] with ragged edges.
extern "C" __global__ void matmul(float* c, const float* a, const float* b, int m, int n, int k) {
    __shared__ float tile_a[8][8];
    __shared__ float tile_b[8][8];
    int row = blockIdx.y * 8 + threadIdx.y, column = blockIdx.x * 8 + threadIdx.x;
    float sum = 0.0f;
    for (int start = 0; start < k; start += 8) {
        int ka = start + threadIdx.x, kb = start + threadIdx.y;
        tile_a[threadIdx.y][threadIdx.x] = row < m && ka < k ? a[row * k + ka] : 0.0f;
        tile_b[threadIdx.y][threadIdx.x] = kb < k && column < n ? b[kb * n + column] : 0.0f;
        __syncthreads();
        for (int i = 0; i < 8; ++i) sum += tile_a[threadIdx.y][i] * tile_b[i][threadIdx.x];
        __syncthreads();
    }
    if (row < m && column < n) c[row * n + column] = sum;
}

// Inclusive scan in place, with both barriers.
extern "C" __global__ void scan_in_place(int* values) {
    extern __shared__ int sums[];
    int i = threadIdx.x;
    sums[i] = values[i];
    __syncthreads();
    for (int offset = 1; offset < blockDim.x; offset *= 2) {
        int left = i >= offset ? sums[i - offset] : 0;
        __syncthreads();
        sums[i] += left;
        __syncthreads();
    }
    values[i] = sums[i];
}

// Three arrays of different types in one dynamic allocation.
extern "C" __global__ void split_dynamic(double* out, const int* in, int n) {
    extern __shared__ __align__(16) unsigned char memory[];
    double* squares = reinterpret_cast<double*>(memory);
    int* values = reinterpret_cast<int*>(squares + n);
    unsigned char* flags = reinterpret_cast<unsigned char*>(values + n);
    int i = threadIdx.x;
    squares[i] = (double)in[i] * in[i];
    values[i] = in[i];
    flags[i] = in[i] % 2 == 0;
    __syncthreads();
    int j = n - 1 - i;
    out[i] = squares[j] + (flags[j] ? values[j] : 0);
}

// Bytes of one word written by different threads; each then reads a neighbour's after the barrier.
extern "C" __global__ void byte_neighbours(signed char* out, const signed char* in) {
    __shared__ signed char row[64];
    row[threadIdx.x] = in[threadIdx.x];
    row[threadIdx.x] = row[threadIdx.x] / 2;
    __syncthreads();
    out[threadIdx.x] = row[(threadIdx.x + 1) % 64];
}

// Stencil with a halo of two cells at each side.
extern "C" __global__ void stencil(float* out, const float* in, int n) {
    __shared__ float tile[64 + 4];
    int i = blockIdx.x * 64 + threadIdx.x;
    for (int cell = threadIdx.x; cell < 68; cell += 64) {
        int source = blockIdx.x * 64 + cell - 2;
        tile[cell] = source >= 0 && source < n ? in[source] : 0.0f;
    }
    __syncthreads();
    if (i < n) {
        float sum = 0.0f;
        for (int tap = 0; tap < 5; ++tap) sum += tile[threadIdx.x + tap];
        out[i] = sum;
    }
}

// Softmax of one row a block, with the same shared slots used for maximum and sum.
extern "C" __global__ void softmax(float* out, const float* in, int width) {
    __shared__ float slots[4];
    const float* row = in + blockIdx.x * width;
    float best = -3.0e38f;
    for (int i = threadIdx.x; i < width; i += 128) best = fmaxf(best, row[i]);
    for (int offset = 16; offset > 0; offset /= 2)
        best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, offset));
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = best;
    __syncthreads();
    best = fmaxf(fmaxf(slots[0], slots[1]), fmaxf(slots[2], slots[3]));
    __syncthreads();
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += 128) sum += expf(row[i] - best);
    sum = warp_total(sum);
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = (slots[0] + slots[1]) + (slots[2] + slots[3]);
    for (int i = threadIdx.x; i < width; i += 128)
        out[blockIdx.x * width + i] = expf(row[i] - best) / sum;
}

// A loop that all threads leave together, by a shared flag.
extern "C" __global__ void halve_until_small(int* out, const int* in, int limit) {
    __shared__ int largest;
    int value = in[threadIdx.x], rounds = 0;
    while (true) {
        if (threadIdx.x == 0) largest = 0;
        __syncthreads();
        atomicMax(&largest, value);
        __syncthreads();
        bool done = largest <= limit;
        __syncthreads();
        if (done) break;
        value /= 2;
        ++rounds;
    }
    out[threadIdx.x] = 1000 * rounds + value;
}

// Block votes.
extern "C" __global__ void block_votes(int* out, const int* in) {
    int positive = in[threadIdx.x] > 0;
    int count = __syncthreads_count(positive);
    int all = __syncthreads_and(positive);
    int any = __syncthreads_or(positive);
    if (threadIdx.x == 0) {
        out[0] = count;
        out[1] = all != 0;
        out[2] = any != 0;
    }
}

// Producer warp and consumer warp, in turns.
extern "C" __global__ void producer_consumer(int* out, const int* in, int rounds) {
    __shared__ int box[2][32];
    int lane = threadIdx.x % 32, sum = 0;
    for (int round = 0; round <= rounds; ++round) {
        if (threadIdx.x < 32 && round < rounds) box[round % 2][lane] = in[round * 32 + lane];
        if (threadIdx.x >= 32 && round > 0) sum += box[(round - 1) % 2][31 - lane];
        __syncthreads();
    }
    if (threadIdx.x >= 32) out[lane] = sum;
}
