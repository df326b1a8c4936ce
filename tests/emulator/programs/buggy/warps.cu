// Kernels that misuse masks and shuffles of a warp.
// Every kernel holds one bug; The comment BUG(kernel) marks the lines that the emulator's error may name.

// All lanes call, but the mask names the lower half only.
extern "C" __global__ void lane_not_in_mask(int* out, const int* in) {
    int value = in[threadIdx.x];
    for (int offset = 8; offset > 0; offset /= 2)
        value += __shfl_down_sync(0x0000ffffu, value, offset);  // BUG(lane_not_in_mask)
    out[threadIdx.x] = value;
}

// __syncwarp with a mask that leaves callers out.
extern "C" __global__ void syncwarp_not_in_mask(int* out, const int* in) {
    __shared__ int cells[32];
    cells[threadIdx.x] = in[threadIdx.x];
    __syncwarp(0x0fffffffu);  // BUG(syncwarp_not_in_mask)
    out[threadIdx.x] = cells[31 - threadIdx.x];
}

// A full mask in each branch, of two different operations.
extern "C" __global__ void lanes_in_other_branch(int* out, const int* in) {
    int value = in[threadIdx.x];
    if (threadIdx.x < 16)
        value = __shfl_xor_sync(0xffffffffu, value, 1);  // BUG(lanes_in_other_branch)
    else
        value = __any_sync(0xffffffffu, value > 20);  // BUG(lanes_in_other_branch)
    out[threadIdx.x] = value;
}

// A full-mask vote in a branch, while the others already wait at the warp's next barrier.
extern "C" __global__ void lanes_never_come(unsigned* out, const int* in) {
    unsigned votes = 0;
    if (in[threadIdx.x] > 0)
        votes = __ballot_sync(0xffffffffu, in[threadIdx.x] > 5);  // BUG(lanes_never_come)
    __syncwarp();  // BUG(lanes_never_come)
    out[threadIdx.x] = votes;
}

// The upper lanes have returned; the lower ones still read them.
extern "C" __global__ void reads_exited_lane(int* out, const int* in, int n) {
    if (threadIdx.x >= n) return;
    int value = in[threadIdx.x];
    value += __shfl_down_sync(0xffffffffu, value, 8);  // BUG(reads_exited_lane)
    out[threadIdx.x] = value;
}

// A block of 48 threads: the second warp has 16 lanes, the butterfly reads 32.
extern "C" __global__ void reads_missing_lane(float* out, const float* in) {
    float value = in[threadIdx.x];
    value += __shfl_xor_sync(0xffffffffu, value, 16);  // BUG(reads_missing_lane)
    out[threadIdx.x] = value;
}

// The mask is right for the callers, but the source lane is not in it.
extern "C" __global__ void source_not_in_mask(int* out, const int* in) {
    int value = in[threadIdx.x];
    if (threadIdx.x < 16)
        value = __shfl_sync(0x0000ffffu, value, 20);  // BUG(source_not_in_mask)
    out[threadIdx.x] = value;
}

// Segments of 12 lanes, which no shuffle has.
extern "C" __global__ void bad_shuffle_width(int* out, const int* in) {
    out[threadIdx.x] = __shfl_sync(0xffffffffu, in[threadIdx.x], 0, 12);  // BUG(bad_shuffle_width)
}

// A mask computed from the data names no lane at all for some.
extern "C" __global__ void vote_with_empty_mask(int* out, const int* in) {
    unsigned mask = in[threadIdx.x] ? 0xffffffffu : 0u;
    out[threadIdx.x] = __any_sync(mask, 1);  // BUG(vote_with_empty_mask)
}

// Lanes of one call give different masks, and read across them.
extern "C" __global__ void masks_disagree(int* out, const int* in) {
    unsigned mask = threadIdx.x < 16 ? 0xffffffffu : 0xffff0000u;
    out[threadIdx.x] = __shfl_xor_sync(mask, in[threadIdx.x], 16);  // BUG(masks_disagree)
}
