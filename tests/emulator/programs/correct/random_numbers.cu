// The numbers that decide a draw: words and noise of philox.cuh, the mass of sampling_mass.cuh.
#include "philox.cuh"
#include "sampling_mass.cuh"

extern "C" __global__ void words(unsigned* out, const u64* seed, const unsigned* position,
                                 const unsigned* index, const int* token, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    out[i] = token_word({seed[i], position[i], index[i]}, token[i]);
  }
}

extern "C" __global__ void noises(float* single, double* twice, const unsigned* words, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    single[i] = noise_in_float(words[i]);
    twice[i] = noise_in_double(words[i]);
  }
}

extern "C" __global__ void masses(u64* out, const float* distance, int n) {
  __shared__ u64 powers[POWERS];
  make_powers(powers);
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = fixed_mass(distance[i], powers);
}
