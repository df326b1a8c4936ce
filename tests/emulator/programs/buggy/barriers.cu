// Kernels that hang, diverge at a barrier, loop for ever, run out of stack, or meet undefined integers.
// Every kernel holds one bug; The comment BUG(kernel) marks the lines that the emulator's error may name.

// A barrier that only the threads with work reach, while the others go on to the next one.
extern "C" __global__ void barrier_in_if(float* out, const float* in, int n) {
    __shared__ float cells[64];
    if (threadIdx.x < n) {
        cells[threadIdx.x] = in[threadIdx.x];
        __syncthreads();  // BUG(barrier_in_if)
    }
    float value = threadIdx.x < n ? cells[n - 1 - threadIdx.x] : 0.0f;
    __syncthreads();  // BUG(barrier_in_if)
    out[threadIdx.x] = value;
}

// Both branches have a barrier, but not the same one.
extern "C" __global__ void barrier_in_both_branches(int* out) {
    if (threadIdx.x % 2 == 0) {
        out[threadIdx.x] = 0;
        __syncthreads();  // BUG(barrier_in_both_branches)
    } else {
        out[threadIdx.x] = 1;
        __syncthreads();  // BUG(barrier_in_both_branches)
    }
}

// A block-stride loop with a barrier inside: the last round is not everybody's.
extern "C" __global__ void barrier_in_ragged_loop(float* out, const float* in, int n) {
    __shared__ float cells[64];
    float sum = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        cells[threadIdx.x] = in[i];
        __syncthreads();  // BUG(barrier_in_ragged_loop)
        sum += cells[threadIdx.x];
    }
    __syncthreads();  // BUG(barrier_in_ragged_loop)
    out[threadIdx.x] = sum;
}

// Threads leave the loop one by one and wait outside while the others wait inside.
extern "C" __global__ void break_before_barrier(int* out, int rounds) {
    int round = 0;
    while (true) {
        if (round >= rounds + threadIdx.x % 2) break;
        ++round;
        __syncthreads();  // BUG(break_before_barrier)
    }
    __syncthreads();  // BUG(break_before_barrier)
    out[threadIdx.x] = round;
}

// __syncthreads_count in one branch against __syncthreads in the other.
extern "C" __global__ void different_barrier_kinds(int* out, const int* in) {
    int count = 0;
    if (in[threadIdx.x] > 0)
        count = __syncthreads_count(1);  // BUG(different_barrier_kinds)
    else
        __syncthreads();  // BUG(different_barrier_kinds)
    out[threadIdx.x] = count;
}

// Half a warp waits for the block, half for the warp.
extern "C" __global__ void syncthreads_against_syncwarp(int* out) {
    if (threadIdx.x < 16) {
        __syncthreads();  // BUG(syncthreads_against_syncwarp)
    } else {
        __syncwarp();  // BUG(syncthreads_against_syncwarp)
    }
    out[threadIdx.x] = 1;
}

// One half of a warp waits for the block while the other shuffles with all lanes.
extern "C" __global__ void syncthreads_against_shuffle(int* out) {
    int value = threadIdx.x;
    if (threadIdx.x % 32 < 16) {
        __syncthreads();  // BUG(syncthreads_against_shuffle)
    } else {
        value = __shfl_xor_sync(0xffffffffu, value, 1);  // BUG(syncthreads_against_shuffle)
        __syncthreads();
    }
    out[threadIdx.x] = value;
}

// Integer square root by bisection that rounds the middle down: no progress, and no memory access.
extern "C" __global__ void endless_bisection(unsigned* out, unsigned n) {
    unsigned low = 0, high = n;
    while (low < high) {  // BUG(endless_bisection)
        unsigned middle = (low + high) / 2;  // BUG(endless_bisection)
        if (middle * middle <= n)  // BUG(endless_bisection)
            low = middle;  // BUG(endless_bisection)
        else
            high = middle - 1;  // BUG(endless_bisection)
    }
    out[0] = low;
}

// Follows a linked list that has a ring in it.
extern "C" __global__ void endless_list(int* out, const int* next) {
    int node = 0, length = 0;
    while (node >= 0) {  // BUG(endless_list)
        node = next[node];  // BUG(endless_list)
        ++length;  // BUG(endless_list)
    }
    out[0] = length;
}

// A lock that its owner forgets to release.
extern "C" __global__ void lock_never_released(int* lock, int* counter) {
    while (atomicCAS(lock, 0, 1) != 0) {  // BUG(lock_never_released)
    }
    *counter += 1;
}

// Block 0 waits for a flag which block 1 sets: nothing promises that block 1 runs.
extern "C" __global__ void wait_for_other_block(volatile int* flag, int* out) {
    if (blockIdx.x == 0) {
        while (*flag == 0) {  // BUG(wait_for_other_block)
        }
        out[0] = 1;
    } else {
        *flag = 1;
    }
}

// Recursion whose end is never met.
__device__ int count_down(volatile int* cells, int n) {  // BUG(endless_recursion)
    if (n == 0) return 0;  // BUG(endless_recursion)
    return cells[count_down(cells, n - 2) & 1];  // BUG(endless_recursion)
}
extern "C" __global__ void endless_recursion(int* out, int n) {
    out[1] = count_down(out, n);
}

// A local array of 16 MiB.
extern "C" __global__ void huge_local_array(float* out, int n) {  // BUG(huge_local_array)
    float cells[4 << 20];  // BUG(huge_local_array)
    for (int i = 0; i < n; ++i) cells[i * 1024] = out[0] + i;  // BUG(huge_local_array)
    float sum = 0.0f;
    for (int i = 0; i < n; ++i) sum += cells[i * 1024];  // BUG(huge_local_array)
    out[0] = sum;
}

// The mask of the lanes up to and including this one, by a shift of 32 in the last lane.
extern "C" __global__ void shift_by_width(unsigned* out) {
    unsigned lane = threadIdx.x;
    out[lane] = (1u << (lane + 1)) - 1u;  // BUG(shift_by_width)
}

// Unpacks nibbles from the top, one step too far.
extern "C" __global__ void shift_by_negative(int* out, const int* in, int count) {
    for (int i = 0; i < count; ++i) {
        int shift = 28 - 4 * i;
        out[i] = (in[0] >> shift) & 15;  // BUG(shift_by_negative)
    }
}

// Mean of a segment that may be empty.
extern "C" __global__ void divide_by_zero(int* out, const int* sums, const int* counts) {
    out[threadIdx.x] = sums[threadIdx.x] / counts[threadIdx.x];  // BUG(divide_by_zero)
}

extern "C" __global__ void remainder_by_zero(int* out, const int* values, int ring) {
    out[threadIdx.x] = values[threadIdx.x] % ring;  // BUG(remainder_by_zero)
}

// An assertion of the kernel's author that does not hold.
extern "C" __global__ void failing_assert(int* out, const int* ids, int limit) {
    int id = ids[threadIdx.x];
    assert(id < limit);  // BUG(failing_assert)
    out[threadIdx.x] = id;
}
