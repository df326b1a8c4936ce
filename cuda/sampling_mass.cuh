// The mass of a token in fixed point: round(2^40 exp(-distance)), in integer arithmetic.
//
// The GPUs of many machines compute in double at 1/64 of the rate of float, and a float is too
// short: sums over a vocabulary have to be good to much less than one token of it. So the exp is
// taken apart in fixed point, all of it at full rate:
//
//   distance log2(e) = n + j / 64 + r,   n and j integers, 0 <= r < 1 / 64
//   exp(-distance)   = 2^-n 2^(-j / 64) exp(-z),   z = r log(2) < 1 / 92
//
// with 2^(-j / 64) from a table and exp(-z) = 1 - z + z^2 / 2 (1 - z / 3 (1 - z / 4 (1 - z / 5))).
// The error is below 2^-43 of the result before it is rounded, so that a mass is that of a host
// computing in double, or one unit beside it. It never rises with the distance by more than that
// unit, and equal distances have equal masses everywhere.
#pragma once

#include "sampling_row.cuh"

constexpr int MASS_BITS = 40;  // the likeliest token weighs 2^40; 2^18 tokens stay below 2^63
constexpr int POWERS = 64;

// The largest distance whose mass is not 0, as bits: the float below 41 log(2).
constexpr unsigned LAST_MASSIVE = 0x41e35a2eu;

// powers[j] = 2^63 2^(-j / 64). To be read after a barrier.
__device__ __forceinline__ void make_powers(u64* powers) {
  for (int j = threadIdx.x; j < POWERS; j += blockDim.x) {
    powers[j] = __double2ull_rn(exp2(-j / double(POWERS)) * 9223372036854775808.0);
  }
}

// `distance` is at most LAST_MASSIVE. A number a with b fractional bits is written a_b.
__device__ __forceinline__ u64 fixed_mass(float distance, const u64* powers) {
  const u64 distance_58 = __float2ull_rz(__fmul_rn(distance, 288230376151711744.0f));
  const u64 t_57 = __umul64hi(distance_58, 0xB8AA3B295C17F0BBull);          // log2(e)_63
  const int n = (int)(t_57 >> 57);
  const int j = (int)(t_57 >> 51) & (POWERS - 1);
  const u64 z_70 = __umul64hi(t_57 << 13, 0xB17217F7D1CF79ABull);           // log(2)_64
  const unsigned z_38 = (unsigned)(z_70 >> 32);
  const unsigned one_32 = 0xffffffffu;
  unsigned series_32 = one_32 - (__umulhi(z_38, 0x33333333u) >> 6);         // 1 - z / 5
  series_32 = one_32 - (__umulhi(z_38, series_32) >> 8);                    // 1 - z / 4 (...)
  series_32 = one_32 - (__umulhi(__umulhi(z_38, series_32), 0x55555555u) >> 6);  // 1 - z / 3 (...)
  const unsigned square_44 = __umulhi(__umulhi(z_38, z_38), series_32);     // z^2 (...)
  const u64 exp_63 = (1ull << 63) - (z_70 >> 7) + ((u64)square_44 << 18);
  const u64 mass_62 = __umul64hi(powers[j], exp_63);
  const int beyond = 62 - MASS_BITS + n;
  return (mass_62 + (1ull << (beyond - 1))) >> beyond;
}
