// The PTX instructions that kernels use, each behind a function: asynchronous copies, matrix loads
// from shared memory, and products of small matrices. Each has a branch for the device, which is
// one instruction, and one for the host, which does what the instruction does, out of the layouts
// below.
//
// A product of a warp is D = A B + C; lane l has g = l / 4 and t = l % 4. A register holds two f16
// or bf16, or four s8, of ascending columns of A or rows of B, the lowest in the low bits.
//
//   m16n8k16, f16 and bf16            m16n8k32, s8                     both: C and D [16, 8]
//   a[0]: row g,     cols 2t .. +1    a[0]: row g,     cols 4t .. +3   c[0]: row g,     col 2t
//   a[1]: row g + 8, cols 2t .. +1    a[1]: row g + 8, cols 4t .. +3   c[1]: row g,     col 2t + 1
//   a[2]: row g,     cols 2t + 8, 9   a[2]: row g,     cols 4t+16..19  c[2]: row g + 8, col 2t
//   a[3]: row g + 8, cols 2t + 8, 9   a[3]: row g + 8, cols 4t+16..19  c[3]: row g + 8, col 2t + 1
//   b[0]: rows 2t .. +1,  col g       b[0]: rows 4t .. +3,  col g
//   b[1]: rows 2t + 8, 9, col g       b[1]: rows 4t+16..19, col g
//
// ldmatrix loads 1, 2 or 4 matrices of 8 x 8 elements of 16 bits. Lane 8 m + r gives the address of
// row r of matrix m: 16 bytes, aligned to 16. Register m of lane l then holds elements 2t and
// 2t + 1 of row g of matrix m; with .trans, elements g of rows 2t and 2t + 1. All lanes take part
// in all of these.
#pragma once

#ifdef CUPAGED_EMULATED
#include "ptx_host.cuh"
#else

// Starts to copy BYTES (4, 8, 16) bytes to shared memory; both ends are aligned to BYTES. 16 bytes
// go past L1. It is there after a commit and the wait for it, to other threads after a barrier too.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "4, 8 or 16 bytes");
  const unsigned to = (unsigned)__cvta_generic_to_shared(shared);
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(BYTES)
                 : "memory");
  }
}

// The same of the first `count` bytes only, 0 to BYTES; the rest becomes zeros.
template <int BYTES>
__device__ __forceinline__ void copy_async_or_zero(void* shared, const void* global, int count) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "4, 8 or 16 bytes");
  const unsigned to = (unsigned)__cvta_generic_to_shared(shared);
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(count)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(global), "n"(BYTES),
                 "r"(count)
                 : "memory");
  }
}

// Closes the group of the thread's copies since the last commit; an empty group counts too.
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most GROUPS of the thread's groups, the latest, are under way.
template <int GROUPS>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

// Waits for all of the thread's copies, committed or not.
__device__ __forceinline__ void copy_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ __forceinline__ void ldmatrix_x1(unsigned (&out)[1], const void* row) {
  const unsigned from = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(out[0])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2(unsigned (&out)[2], const void* row) {
  const unsigned from = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(out[0]), "=r"(out[1])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(unsigned (&out)[4], const void* row) {
  const unsigned from = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x1_trans(unsigned (&out)[1], const void* row) {
  const unsigned from = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
               : "=r"(out[0])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2_trans(unsigned (&out)[2], const void* row) {
  const unsigned from = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(out[0]), "=r"(out[1])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&out)[4], const void* row) {
  const unsigned from = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(from)
               : "memory");
}

// c += A B, A f16 [16, 16], B f16 [16, 8], c float.
__device__ __forceinline__ void mma_f16(float (&c)[4], const unsigned (&a)[4],
                                        const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c += A B, A bf16 [16, 16], B bf16 [16, 8], c float.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const unsigned (&a)[4],
                                         const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c += A B, A s8 [16, 32], B s8 [32, 8], c int32, which wraps.
__device__ __forceinline__ void mma_s8(int (&c)[4], const unsigned (&a)[4],
                                       const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif
