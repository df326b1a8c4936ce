// Kernels that leave an array argument, write where they may not, or load misaligned vectors.
// Every kernel holds one bug; The comment BUG(kernel) marks the line that the emulator's error must name.
#include <cuda_fp16.h>

// out[i] = scale * in[i]: the guard lets index n through.
extern "C" __global__ void scale_past_end(float* out, const float* in, float scale, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= n)
        out[i] = scale * in[i];  // BUG(scale_past_end)
}

// Three-point mean whose left edge has no guard.
extern "C" __global__ void mean_before_start(float* out, const float* in, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float left = in[i - 1];  // BUG(mean_before_start)
    float right = i + 1 < n ? in[i + 1] : 0.0f;
    out[i] = (left + in[i] + right) / 3.0f;
}

// Three-point mean whose right edge has no guard.
extern "C" __global__ void mean_past_end(float* out, const float* in, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float left = i > 0 ? in[i - 1] : 0.0f;
    float right = in[i + 1];  // BUG(mean_past_end)
    out[i] = (left + in[i] + right) / 3.0f;
}

// Rotates by one place to the left, and forgets where the first element goes.
extern "C" __global__ void rotate_before_start(int* out, const int* in, int n) {
    int i = threadIdx.x;
    if (i < n) {
        int value = in[i];
        out[i - 1] = value;  // BUG(rotate_before_start)
    }
}

// y = a * x + y, where the guard knows the length of x only.
extern "C" __global__ void axpy_short_y(const float* x, float* y, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        float old = y[i];  // BUG(axpy_short_y)
        y[i] = a * x[i] + old;
    }
}

// Embedding rows by id; an id of -1 (padding) is not skipped.
extern "C" __global__ void embed_negative_id(float* out, const float* table, const int* ids,
                                             int width) {
    int id = ids[blockIdx.x];
    for (int column = threadIdx.x; column < width; column += blockDim.x) {
        float value = table[id * width + column];  // BUG(embed_negative_id)
        out[blockIdx.x * width + column] = value;
    }
}

// Copies by float4; n is rounded up to packs, so the last pack hangs over the end.
extern "C" __global__ void copy_float4_tail(float* out, const float* in, int n) {
    int pack = threadIdx.x;
    if (pack < (n + 3) / 4) {
        float4 value = reinterpret_cast<const float4*>(in)[pack];  // BUG(copy_float4_tail)
        for (int i = 0; i < 4; ++i)
            if (4 * pack + i < n) out[4 * pack + i] = (&value.x)[i];
    }
}

// Doubles by half2; an odd n leaves half a pair at the end.
extern "C" __global__ void double_half2_tail(__half* values, int n) {
    int pair = threadIdx.x;
    if (2 * pair < n) {
        __half2* pairs = reinterpret_cast<__half2*>(values);
        __half2 old = pairs[pair];  // BUG(double_half2_tail)
        pairs[pair] = __hadd2(old, old);
    }
}

// Dequantises int8 by whole 16-byte packs; the last pack of the row is not full.
extern "C" __global__ void dequantize_uint4_tail(float* out, const signed char* in, int n) {
    int pack = threadIdx.x;
    if (16 * pack >= n) return;
    uint4 raw = *reinterpret_cast<const uint4*>(in + 16 * pack);  // BUG(dequantize_uint4_tail)
    unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
    for (int i = 0; i < 16 && 16 * pack + i < n; ++i)
        out[16 * pack + i] = static_cast<signed char>(words[i / 4] >> (8 * (i % 4)));
}

// Sums bytes; the loop bound is inclusive.
extern "C" __global__ void sum_bytes_inclusive(int* out, const signed char* in, int n) {
    int sum = 0;
    for (int i = threadIdx.x; i <= n; i += blockDim.x)
        sum += in[i];  // BUG(sum_bytes_inclusive)
    atomicAdd(out, sum);
}

// Histogram of values 0..bins; the value `bins` has no counter.
extern "C" __global__ void histogram_bin_past_end(int* counts, const int* values, int n) {
    int i = threadIdx.x;
    if (i < n)
        atomicAdd(&counts[values[i]], 1);  // BUG(histogram_bin_past_end)
}

struct Entry {
    float weights[5];
    int id;
};

// Shifts whole records by one; the last record reads past the end.
extern "C" __global__ void shift_entries(Entry* out, const Entry* in, int n) {
    int i = threadIdx.x;
    if (i < n) {
        Entry entry = in[i + 1];  // BUG(shift_entries)
        out[i] = entry;
    }
}

// Copies rows by memcpy with the row's length in elements of the wrong array.
extern "C" __global__ void copy_rows_memcpy(float* out, const float* in, int rows, int width,
                                            int bytes) {
    int row = threadIdx.x;
    if (row < rows)
        memcpy(out + row * width, in + row * width, bytes);  // BUG(copy_rows_memcpy)
}

// Sums a paged cache [num_blocks, block_size, width] through a block table; the loop goes one token too
// far, into a table entry that is not valid.
extern "C" __global__ void paged_sum_stale_block(float* out, const float* cache,
                                                 const int* block_table, int length,
                                                 int block_size, int width) {
    float sum = 0.0f;
    for (int token = 0; token <= length; ++token) {
        long long block = block_table[token / block_size];
        long long base = (block * block_size + token % block_size) * width;
        sum += cache[base + threadIdx.x];  // BUG(paged_sum_stale_block)
    }
    out[threadIdx.x] = sum;
}

// A wild 64-bit offset, as a stale pointer difference gives.
extern "C" __global__ void wild_offset(float* out, const float* in, long long offset) {
    out[threadIdx.x] = in[offset + threadIdx.x];  // BUG(wild_offset)
}

// Row strides in a 3-D grid: the stride of the second axis is used for the first.
extern "C" __global__ void swapped_strides(float* out, int depth, int height, int width) {
    int x = threadIdx.x, y = threadIdx.y, z = blockIdx.z;
    if (z < depth)
        out[z * depth * width * height + y * width + x] = 1.0f;  // BUG(swapped_strides)
}

// Normalises "in place" through a cast of a const argument.
extern "C" __global__ void write_through_const(const float* x, float scale) {
    float* mutable_x = const_cast<float*>(x);
    mutable_x[threadIdx.x] = scale;  // BUG(write_through_const)
}

// Counts hits in a table that its signature promises to leave alone.
extern "C" __global__ void atomic_through_const(const int* counts, const int* values) {
    atomicAdd(const_cast<int*>(counts) + values[threadIdx.x], 1);  // BUG(atomic_through_const)
}

// Writes an output which the caller gave as a read-only array.
extern "C" __global__ void fill(float* out, float value) {
    out[threadIdx.x] = value;  // BUG(fill)
}

// float4 loads that start one float after an aligned address.
extern "C" __global__ void load_float4_shifted(float* out, const float* in) {
    float4 value = *reinterpret_cast<const float4*>(in + 1 + 4 * threadIdx.x);  // BUG(load_float4_shifted)
    out[threadIdx.x] = value.x + value.y + value.z + value.w;
}

// Rows of 30 floats read as float2 packs are fine, as float4 packs only even rows are aligned.
extern "C" __global__ void row_sum_float4(float* out, const float* in, int width) {
    const float* row = in + blockIdx.x * width;
    float sum = 0.0f;
    for (int i = 0; i + 4 <= width; i += 4) {
        float4 pack = *reinterpret_cast<const float4*>(row + i);  // BUG(row_sum_float4)
        sum += pack.x + pack.y + pack.z + pack.w;
    }
    out[blockIdx.x] = sum;
}

// half2 load at an odd half.
extern "C" __global__ void load_half2_odd(float* out, const __half* in, int start) {
    __half2 pair = *reinterpret_cast<const __half2*>(in + start);  // BUG(load_half2_odd)
    out[0] = __low2float(pair) + __high2float(pair);
}

// Packs two ints as one 64-bit store at an odd int.
extern "C" __global__ void store_longlong_odd(int* out) {
    long long packed = 0x100000002LL;
    *reinterpret_cast<long long*>(out + 1) = packed;  // BUG(store_longlong_odd)
}

// 64-bit counters laid over a 32-bit header word.
extern "C" __global__ void atomic_longlong_odd(int* header) {
    atomicAdd(reinterpret_cast<unsigned long long*>(header + 1), 1ULL);  // BUG(atomic_longlong_odd)
}

// Reads the step after the last through the read-only cache.
extern "C" __global__ void ldg_past_end(float* out, const float* in, int n) {
    int i = threadIdx.x;
    float next = i < n ? __ldg(in + i + 1) : 0.0f;  // BUG(ldg_past_end)
    if (i < n) out[i] = next - in[i];
}

// An optional bias that nobody gave.
extern "C" __global__ void null_bias(float* out, const float* in, int has_bias) {
    const float* bias = has_bias ? in : nullptr;
    out[threadIdx.x] = in[threadIdx.x] + bias[threadIdx.x];  // BUG(null_bias)
}

// Adds pairs of halves atomically; the last half has no partner.
extern "C" __global__ void atomic_half2_tail(__half* sums, int n) {
    if (2 * threadIdx.x < n)
        atomicAdd(reinterpret_cast<__half2*>(sums) + threadIdx.x, __float2half2_rn(1.0f));  // BUG(atomic_half2_tail)
}
