// The host branch of ptx.cuh: what each instruction does, for the emulator. Included by it alone.
//
// Asynchronous copies are the emulator's: they happen at the wait that covers them. The others
// bring the 32 lanes of a warp together once; the last one works out the registers of all. Products
// are summed in float over ascending k, each step rounded once; the device sums in an order of its
// own, so results of f16 and bf16 agree to rounding only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace ptx_host {

using ::emulator::Place;

constexpr unsigned ALL = 0xffffffffu;

inline void need_all_lanes(const char* name, unsigned arrived, Place place) {
  if (arrived == ALL) return;
  ::emulator::fail(::emulator::Kind::warp_mask, place,
                   "%s takes all 32 lanes of a warp; only the lanes %08x came", name, arrived);
}

template <int COUNT>
struct Registers {
  unsigned at[COUNT];
};

template <int MATRICES, bool TRANSPOSED>
EMULATOR_UNCHECKED void read_matrices(const void* const* const* rows,
                                      Registers<MATRICES>* const* out) {
  for (int matrix = 0; matrix < MATRICES; ++matrix) {
    for (int lane = 0; lane < 32; ++lane) {
      unsigned short pair[2];
      for (int j = 0; j < 2; ++j) {
        const int row = TRANSPOSED ? 2 * (lane % 4) + j : lane / 4;
        const int column = TRANSPOSED ? lane / 4 : 2 * (lane % 4) + j;
        pair[j] = static_cast<const unsigned short*>(*rows[8 * matrix + row])[column];
      }
      out[lane]->at[matrix] = pair[0] | (unsigned)pair[1] << 16;
    }
  }
}

template <int MATRICES, bool TRANSPOSED>
void ldmatrix(const char* name, unsigned (&out)[MATRICES], const void* row, Place place) {
  if (::emulator::lane_id() < 8 * MATRICES) {  // the other lanes' addresses are not used
    if (!::emulator::is_shared(row)) {
      ::emulator::fail(::emulator::Kind::out_of_bounds, place,
                       "%s: the row's address %p is not in shared memory", name, row);
    }
    ::emulator::check_alignment("the row of ldmatrix", row, 16, place);
    ::emulator::check_read(row, 16, place);
  }
  auto all = [name, place](const void* const* const* rows, Registers<MATRICES>* const* registers,
                           unsigned arrived) {
    need_all_lanes(name, arrived, place);
    read_matrices<MATRICES, TRANSPOSED>(rows, registers);
  };
  const auto mine =
      ::emulator::warp_collective<Registers<MATRICES>>(name, ALL, row, all, place);
  for (int matrix = 0; matrix < MATRICES; ++matrix) out[matrix] = mine.at[matrix];
}

template <class Sum>
struct Operands {
  unsigned a[4];
  unsigned b[2];
  Sum c[4];
};

template <class Sum>
struct Fragment {
  Sum c[4];
};

struct HalfElements {
  using Sum = float;
  static constexpr int BITS = 16;
  EMULATOR_UNCHECKED static float value(unsigned bits) {
    return __half2float(__ushort_as_half((unsigned short)bits));
  }
  EMULATOR_UNCHECKED static __forceinline__ float add(float sum, float a, float b) {
    return __builtin_fmaf(a, b, sum);
  }
};

struct BfloatElements {
  using Sum = float;
  static constexpr int BITS = 16;
  EMULATOR_UNCHECKED static float value(unsigned bits) {
    return __bfloat162float(__ushort_as_bfloat16((unsigned short)bits));
  }
  EMULATOR_UNCHECKED static __forceinline__ float add(float sum, float a, float b) {
    return __builtin_fmaf(a, b, sum);
  }
};

struct ByteElements {
  using Sum = int;
  static constexpr int BITS = 8;
  EMULATOR_UNCHECKED static int value(unsigned bits) { return (signed char)bits; }
  EMULATOR_UNCHECKED static __forceinline__ int add(int sum, int a, int b) {
    return (int)((unsigned)sum + (unsigned)(a * b));  // wraps
  }
};

// Out of the lanes' registers into whole matrices, then D = A B + C, then back.
template <class Elements>
EMULATOR_UNCHECKED void multiply(const Operands<typename Elements::Sum>* const* in,
                                 Fragment<typename Elements::Sum>* const* out) {
  using Sum = typename Elements::Sum;
  constexpr int EACH = 32 / Elements::BITS;  // elements of a register
  constexpr int K = 8 * EACH;
  Sum a[16][K];
  Sum b[K][8];
  Sum c[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4;
    const int t = lane % 4;
    for (int j = 0; j < EACH; ++j) {
      for (int half = 0; half < 2; ++half) {
        const int k = half * K / 2 + EACH * t + j;
        const int shift = Elements::BITS * j;
        a[g][k] = Elements::value(in[lane]->a[2 * half] >> shift);
        a[g + 8][k] = Elements::value(in[lane]->a[2 * half + 1] >> shift);
        b[k][g] = Elements::value(in[lane]->b[half] >> shift);
      }
    }
    for (int j = 0; j < 4; ++j) c[g + j / 2 * 8][2 * t + j % 2] = in[lane]->c[j];
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < K; ++k) {
      for (int column = 0; column < 8; ++column) {
        c[row][column] = Elements::add(c[row][column], a[row][k], b[k][column]);
      }
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int j = 0; j < 4; ++j) out[lane]->c[j] = c[lane / 4 + j / 2 * 8][2 * (lane % 4) + j % 2];
  }
}

template <class Elements>
void mma(const char* name, typename Elements::Sum (&c)[4], const unsigned (&a)[4],
         const unsigned (&b)[2], Place place) {
  using Sum = typename Elements::Sum;
  const Operands<Sum> mine{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {c[0], c[1], c[2], c[3]}};
  auto all = [name, place](const Operands<Sum>* const* in, Fragment<Sum>* const* out,
                           unsigned arrived) {
    need_all_lanes(name, arrived, place);
    multiply<Elements>(in, out);
  };
  const auto sum = ::emulator::warp_collective<Fragment<Sum>>(name, ALL, mine, all, place);
  for (int j = 0; j < 4; ++j) c[j] = sum.c[j];
}

}  // namespace ptx_host

template <int BYTES>
void copy_async(void* shared, const void* global, ::emulator::Place place = EMULATOR_HERE) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "4, 8 or 16 bytes");
  ::emulator::async_copy(shared, global, BYTES, BYTES, place);
}

template <int BYTES>
void copy_async_or_zero(void* shared, const void* global, int count,
                        ::emulator::Place place = EMULATOR_HERE) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "4, 8 or 16 bytes");
  if (count < 0 || count > BYTES) {
    ::emulator::fail(::emulator::Kind::undefined, place, "cp.async of %d of %d bytes", count,
                     BYTES);
  }
  ::emulator::async_copy(shared, global, BYTES, count, place);
}

inline void copy_async_commit() { ::emulator::async_commit(); }

template <int GROUPS>
void copy_async_wait() {
  ::emulator::async_wait(GROUPS);
}

inline void copy_async_wait_all() {
  ::emulator::async_commit();
  ::emulator::async_wait(0);
}

inline void ldmatrix_x1(unsigned (&out)[1], const void* row,
                        ::emulator::Place place = EMULATOR_HERE) {
  ptx_host::ldmatrix<1, false>("ldmatrix_x1", out, row, place);
}

inline void ldmatrix_x2(unsigned (&out)[2], const void* row,
                        ::emulator::Place place = EMULATOR_HERE) {
  ptx_host::ldmatrix<2, false>("ldmatrix_x2", out, row, place);
}

inline void ldmatrix_x4(unsigned (&out)[4], const void* row,
                        ::emulator::Place place = EMULATOR_HERE) {
  ptx_host::ldmatrix<4, false>("ldmatrix_x4", out, row, place);
}

inline void ldmatrix_x1_trans(unsigned (&out)[1], const void* row,
                              ::emulator::Place place = EMULATOR_HERE) {
  ptx_host::ldmatrix<1, true>("ldmatrix_x1_trans", out, row, place);
}

inline void ldmatrix_x2_trans(unsigned (&out)[2], const void* row,
                              ::emulator::Place place = EMULATOR_HERE) {
  ptx_host::ldmatrix<2, true>("ldmatrix_x2_trans", out, row, place);
}

inline void ldmatrix_x4_trans(unsigned (&out)[4], const void* row,
                              ::emulator::Place place = EMULATOR_HERE) {
  ptx_host::ldmatrix<4, true>("ldmatrix_x4_trans", out, row, place);
}

inline void mma_f16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                    ::emulator::Place place = EMULATOR_HERE) {
  ptx_host::mma<ptx_host::HalfElements>("mma_f16", c, a, b, place);
}

inline void mma_bf16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                     ::emulator::Place place = EMULATOR_HERE) {
  ptx_host::mma<ptx_host::BfloatElements>("mma_bf16", c, a, b, place);
}

inline void mma_s8(int (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                   ::emulator::Place place = EMULATOR_HERE) {
  ptx_host::mma<ptx_host::ByteElements>("mma_s8", c, a, b, place);
}
