// Random numbers by counter: Philox4x32-10 (Salmon et al., SC 2011), and Gumbel noise made of them.
//
// The noise of a token is a pure function of the request's seed, the sample's index, the position
// in the output and the token's id: the key is the seed, the counter (id / 4, position, index, 0),
// and word id % 4 of its four words is the token's. It is the same in every batch and on every
// device.
#pragma once

// What keys the noise of one draw.
struct NoiseKey {
  unsigned long long seed;
  unsigned position;
  unsigned index;
};

// The words of tokens 4 quad to 4 quad + 3.
__device__ __forceinline__ void philox(unsigned (&words)[4], const NoiseKey& key, unsigned quad) {
  unsigned low = (unsigned)key.seed;
  unsigned high = (unsigned)(key.seed >> 32);
  unsigned c0 = quad;
  unsigned c1 = key.position;
  unsigned c2 = key.index;
  unsigned c3 = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned long long first = (unsigned long long)c0 * 0xD2511F53u;
    const unsigned long long second = (unsigned long long)c2 * 0xCD9E8D57u;
    c0 = (unsigned)(second >> 32) ^ c1 ^ low;
    c1 = (unsigned)second;
    c2 = (unsigned)(first >> 32) ^ c3 ^ high;
    c3 = (unsigned)first;
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

__device__ __forceinline__ unsigned token_word(const NoiseKey& key, int token) {
  unsigned words[4];
  philox(words, key, (unsigned)token / 4);
  const int word = token % 4;
  return word < 2 ? (word == 0 ? words[0] : words[1]) : (word == 2 ? words[2] : words[3]);
}

// Noise is -log(-log(u)), u = (word + 1/2) / 2^32. It lies between -3.13 and this.
constexpr float MOST_NOISE = 22.88f;

// How far two sums of a scaled logit and noise, computed in float, may be from the same in double
// and yet change places, when the larger one is at least the least noise: the logarithms, the noise
// (to 2^-20) and the sum (to 2^-20) err by less than a quarter of this each.
constexpr float NOISE_ERROR = 1.0f / 65536.0f;

// Above 1/2, u is taken from its distance to 1, where float has more bits.
__device__ __forceinline__ float noise_in_float(unsigned word) {
  const bool upper = (word & 0x80000000u) != 0;
  const float part = __fmul_rn(__fadd_rn(__uint2float_rn(upper ? ~word : word), 0.5f),
                               1.0f / 4294967296.0f);
  const float exponential = upper ? -log1pf(-part) : -logf(part);
  return -logf(exponential);
}

__device__ __forceinline__ double noise_in_double(unsigned word) {
  return -log(-log(__dmul_rn(__dadd_rn(__uint2double_rn(word), 0.5), 1.0 / 4294967296.0)));
}
