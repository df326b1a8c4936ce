// Some rows of an array: out[i] = x[clip(rows[i], 0, num_rows - 1)].
//
// Arrays: out T [n, size]; x T [num_rows, size], both aligned to 16 bytes; rows int32 [n]. All are
// contiguous. out overlaps nothing.
//
// Row numbers outside the array are clipped to it, as NumPy's mode="clip"; num_rows is at least 1.
//
// Grid: (n). Block: any up to 256 threads; one block a row. Nothing is rounded.
//
// Define: DTYPE. Cost: 2 size sizeof(T) bytes a row; bound by memory.
#include "rows.cuh"

constexpr int MAX_THREADS = 256;

extern "C" __global__ __launch_bounds__(MAX_THREADS) void gather_rows(
    T* __restrict__ out,           // [n, size]
    const T* __restrict__ x,       // [num_rows, size]
    const int* __restrict__ rows,  // [n]
    int num_rows,
    int size) {
  copy_row(out, x, blockIdx.x, clip_row(rows[blockIdx.x], num_rows), size);
}

/* check -DDTYPE=f32
rows = array([3, 0, 3, -2, 9])  # two lie outside and are clipped
for size in (64, 13):
    x, out = normal(5, size), empty(rows.size, size)
    gather_rows((rows.size,), (32,), (out, x, rows, np.int32(5), np.int32(size)))
    expect(out, x[rows.clip(0, 4)], tolerance=0)
*/
