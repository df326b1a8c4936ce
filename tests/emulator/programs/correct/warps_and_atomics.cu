// Correct kernels around warps, atomics and orders between blocks. None may be flagged.
#include <cooperative_groups.h>

namespace cg = cooperative_groups;

// The two halves of a warp run apart, each with its own mask.
extern "C" __global__ void halves_apart(int* out, const int* in) {
    int value = in[threadIdx.x];
    if (threadIdx.x % 32 < 16)
        value = __shfl_xor_sync(0x0000ffffu, value, 1);
    else
        value = __shfl_xor_sync(0xffff0000u, value, 2);
    __syncwarp();
    out[threadIdx.x] = value;
}

// Sums of 8 lanes by the width argument.
extern "C" __global__ void segment_sum(int* out, const int* in) {
    int value = in[threadIdx.x];
    for (int offset = 4; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset, 8);
    if (threadIdx.x % 8 == 0) out[threadIdx.x / 8] = value;
}

// Keeps the positive values, in order: ballot, popc, and a scan over warps.
extern "C" __global__ void compact(int* out, int* count, const int* in) {
    __shared__ int warp_counts[4];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, value = in[threadIdx.x];
    unsigned votes = __ballot_sync(0xffffffffu, value > 0);
    if (lane == 0) warp_counts[warp] = __popc(votes);
    __syncthreads();
    int place = __popc(votes & ((1u << lane) - 1u));
    for (int i = 0; i < warp; ++i) place += warp_counts[i];
    if (value > 0) out[place] = value;
    if (threadIdx.x == 0) *count = warp_counts[0] + warp_counts[1] + warp_counts[2] + warp_counts[3];
}

// How many lanes of the warp hold this lane's value.
extern "C" __global__ void count_equal(int* out, const int* in) {
    unsigned equal = __match_any_sync(0xffffffffu, in[threadIdx.x]);
    out[threadIdx.x] = __popc(equal);
}

// Lanes that return early leave a full mask valid for the rest.
extern "C" __global__ void vote_after_exit(int* out, int n) {
    if (threadIdx.x >= n) return;
    unsigned mask = (1u << n) - 1u;
    out[threadIdx.x] = __popc(__ballot_sync(mask, threadIdx.x % 2));
}

// Cooperative groups: tiles of 16.
extern "C" __global__ void tile_sum(int* out, const int* in) {
    cg::thread_block block = cg::this_thread_block();
    cg::thread_block_tile<16> tile = cg::tiled_partition<16>(block);
    int value = in[block.thread_rank()];
    for (int offset = tile.size() / 2; offset > 0; offset /= 2) value += tile.shfl_down(value, offset);
    if (tile.thread_rank() == 0) out[block.thread_rank() / 16] = value;
    block.sync();
}

// Shared histogram by atomics, merged into the global one.
extern "C" __global__ void histogram(int* counts, const int* values, int n) {
    __shared__ int bins[32];
    if (threadIdx.x < 32) bins[threadIdx.x] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&bins[values[i]], 1);
    __syncthreads();
    if (threadIdx.x < 32 && bins[threadIdx.x] > 0) atomicAdd(&counts[threadIdx.x], bins[threadIdx.x]);
}

// A spin lock around plain memory, taken once by every thread of a warp and of every block.
extern "C" __global__ void spin_lock(int* lock, volatile int* counter) {
    bool done = false;
    while (!done) {
        if (atomicCAS(lock, 0, 1) == 0) {
            __threadfence();
            *counter = *counter + 1;
            __threadfence();
            atomicExch(lock, 0);
            done = true;
        }
    }
}

// The last block to finish adds the partial sums of all.
extern "C" __global__ void last_block_sum(float* out, float* partial, unsigned* finished, const float* in) {
    __shared__ bool last;
    float value = in[blockIdx.x * 32 + threadIdx.x];
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = value;
        __threadfence();
        last = atomicInc(finished, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    float sum = 0.0f;
    for (int i = threadIdx.x; i < gridDim.x; i += 32) sum += reinterpret_cast<volatile float*>(partial)[i];
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (threadIdx.x == 0) *out = sum;
}

// Maximum of floats by compare-and-swap on their bits.
extern "C" __global__ void float_maximum(float* best, const float* in) {
    int* bits = reinterpret_cast<int*>(best);
    float value = in[blockIdx.x * blockDim.x + threadIdx.x];
    int old = *reinterpret_cast<volatile int*>(bits);
    while (__int_as_float(old) < value) {
        int seen = atomicCAS(bits, old, __float_as_int(value));
        if (seen == old) break;
        old = seen;
    }
}

// Atomics of all kinds, whose results do not depend on the order.
extern "C" __global__ void all_atomics(int* i, unsigned* u, unsigned long long* ull, float* f, double* d) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&i[0], t);
    atomicSub(&i[1], t);
    atomicMin(&i[2], t - 5);
    atomicMax(&i[3], t);
    atomicAnd(&i[4], ~(1 << (t % 8)));
    atomicOr(&i[5], 1 << (t % 31));
    atomicXor(&i[6], 1 << (t % 16));
    atomicCAS(&i[7], 0, 77);
    atomicExch(&i[8], 5);
    atomicInc(&u[0], 9u);
    atomicDec(&u[1], 9u);
    atomicMax(&u[2], 0x80000000u + t);
    atomicAdd(&ull[0], 0x100000000ULL);
    atomicMax(&ull[1], (unsigned long long)t << 33);
    atomicAdd(f, 0.5f);
    atomicAdd(d, 0.25);
}
