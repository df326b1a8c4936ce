// block_sum and block_max of cuda/reduce.cuh, on their own. None may be flagged.
#include "reduce.cuh"

// out[0] = sum, out[1] = maximum of blockDim.x values, as every thread sees them.
extern "C" __global__ void reductions(float* out, const float* in) {
    __shared__ float sums[MAX_WARPS];
    __shared__ float maxima[MAX_WARPS];
    const float sum = block_sum(in[threadIdx.x], sums);
    const float maximum = block_max(in[threadIdx.x], maxima);
    out[2 * threadIdx.x] = sum;
    out[2 * threadIdx.x + 1] = maximum;
}
