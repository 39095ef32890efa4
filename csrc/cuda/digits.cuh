// A query in digits of 8 bits, which tensor cores multiply by int8 rows and by bits in whole
// numbers.
//
// A token's values are rounded to multiples of a step, 2^-22 of the power of two below its largest
// one, or twice that where that is nearly the next. Such a multiple q is less than 2^23 * (1 -
// 2^-7), and q = 2^16 a + 2^8 b + c with a, b and c from -128 to 127. So a value is off by half a
// step at most: by 1.008 * 2^-23 of its token's largest value, whatever its own size.
#pragma once

#include "maxsim.cuh"

namespace {

constexpr int kDigits = 3;
constexpr int kStepBits = 22;  // of the power of two, above a step

__device__ __forceinline__ float power_of_two(int exponent) {  // -126 to 127
  return __uint_as_float(uint32_t(exponent + 127) << 23);
}

// Sums begin at these numbers. Those of the last digit are at most 2^21, of 128 values, and begin
// at the bits of 1.5 * 2^23, so that they are the bits of that and the sum; what this adds is taken
// from the second digit's.
constexpr int kBits = 0x4B400000;
__device__ constexpr int kFirst[kDigits] = {0, -(3 << 22) / 256, kBits};

// What sums of products with digits stand for, the largest digit's first.
__device__ __forceinline__ float number_of(int a, int b, int c) {
  return fmaf(float(a * 256 + b), 256.0f, __int_as_float(c));
}

// What a token's values are multiplied by, in two factors, and its products then.
struct Factors {
  float first, second, product;
};

// Of a token in steps; `peak`: its largest value's size, as bits, of which what is not finite is
// above all that is. From the least step of fp32 to beyond its largest value is further than one
// factor goes.
__device__ __forceinline__ Factors factors_of(uint32_t peak) {
  const int exponent = int((peak + (1u << 17)) >> 23);
  const int up = kStepBits + 127 - exponent, some = up / 2;
  const float step_size = power_of_two(-some) * power_of_two(some - up);
  return {power_of_two(some), power_of_two(up - some), peak >= 0x7F800000u ? NAN : step_size};
}

// The eight values of the query's token 8 * piece + lane / 4 that a lane has in a step's two
// registers: of the dimensions that it has of rows.
template <Format kFormat, int kWidth>
__device__ __forceinline__ void values_of_step(const float* query, int n_query, int piece, int step,
                                               int lane, float* v) {
  const int token = piece * 8 + lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = 0.0f;
  if (token >= n_query) return;
  const float* const at = query + token * kWidth;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (kFormat == kBit1)
      v[i] = at[32 * t + i % 4 * 8 + step * 2 + i / 4];
    else if (32 * step + i / 4 * 16 < kWidth)
      v[i] = at[32 * step + i / 4 * 16 + 4 * t + i % 4];
  }
}

// Byte `digit` of each of four words, the lowest first.
__device__ __forceinline__ uint32_t bytes_of(const uint32_t* word, int digit) {
  const uint32_t choice = uint32_t(digit) * 0x11u + 0x40u;
  return __byte_perm(__byte_perm(word[0], word[1], choice), __byte_perm(word[2], word[3], choice),
                     0x5410u);
}

// Eight values as right operands, the largest digit's first, and their sum, in steps.
struct Operands {
  uint2 digit[kDigits];
  int sum;
};

__device__ __forceinline__ Operands operands_of(const float* v, float first, float second) {
  Operands made;
  made.sum = 0;
  uint32_t word[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int q = __float2int_rn(v[i] * first * second);
    made.sum += q;
    word[i] = uint32_t(q) + 0x808080u;  // digits 128 too large: bytes from 0 on
  }
#pragma unroll
  for (int digit = 0; digit < kDigits; ++digit)
    made.digit[digit] = make_uint2(bytes_of(word, kDigits - 1 - digit) ^ 0x80808080u,
                                   bytes_of(word + 4, kDigits - 1 - digit) ^ 0x80808080u);
  return made;
}

// A lane's own share of the query, as `Query` of parts. Of a step that rows end in the midst of,
// the second register is 0.
template <Format kFormat, int kWidth>
struct Digits {
  static constexpr int kSteps = (kWidth + 31) / 32;
  uint2 held[kDigits][kSteps][kPieces];
  int token;
  float factor, total;  // of bit1: the sum of the token's values, in steps

  __device__ __forceinline__ void prepare(const float* query, int n_query, int lane) {
    token = token_in_the_end(lane);
    factor = 1.0f, total = 0.0f;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      uint32_t peak = 0;
#pragma unroll 2
      for (int step = 0; step < kSteps; ++step) {
        float v[8];
        values_of_step<kFormat, kWidth>(query, n_query, piece, step, lane, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) peak = max(peak, __float_as_uint(v[i]) & 0x7FFFFFFFu);
      }
      peak = max(peak, __shfl_xor_sync(kAll, peak, 1));
      peak = max(peak, __shfl_xor_sync(kAll, peak, 2));
      const Factors factors = factors_of(peak);
      int sum = 0;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        float v[8];
        values_of_step<kFormat, kWidth>(query, n_query, piece, step, lane, v);
        const Operands made = operands_of(v, factors.first, factors.second);
#pragma unroll
        for (int digit = 0; digit < kDigits; ++digit) held[digit][step][piece] = made.digit[digit];
        sum += made.sum;
      }
      // Lanes of the same lane / 4 have the same token here.
      const bool is_own = piece == lane >> 3;
      const float of_own = __shfl_sync(kAll, factors.product, token % 8 * 4);
      if (is_own) factor = of_own;
      if constexpr (kFormat == kBit1) {
        sum += __shfl_xor_sync(kAll, sum, 1);
        sum += __shfl_xor_sync(kAll, sum, 2);
        const float total_of_own = float(__shfl_sync(kAll, sum, token % 8 * 4));
        if (is_own) total = total_of_own;
      }
    }
  }

  __device__ __forceinline__ uint2 digit(int digit, int step, int piece) const {
    return held[digit][step][piece];
  }

  // Of the largest sum. A bit b is 2 b - 1: the largest is where the one of bits is.
  __device__ __forceinline__ float product_of(float largest) const {
    if (kFormat != kBit1) return largest * factor;
    return fmaf(2.0f, largest, -total) * 0.08838834764831845f * factor;  // 128^-1/2
  }
};

}  // namespace
