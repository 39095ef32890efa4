// exp and log of the accelerator: fixed sequences of double operations, so that C++ and numpy agree
// to the bit. This folder is compiled without fused multiply-add (setup.py).
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace espnx::accelerator {

constexpr double kLog2E = 1.4426950408889634, kLn2High = 6.93147180369123816490e-01,
                 kLn2Low = 1.90821492927058770002e-10;
constexpr double kNoFractions =
    6755399441055744.0;  // 1.5 * 2^52: a double this large has no room for fractions
constexpr double kLeastExponent = -200.0;  // far below where fp32 ends

inline uint64_t bits_of(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline double from_bits(uint64_t bits) {
  double x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// exp(x) for x <= 0, rounded to fp32; NaN for NaN. Off by less than 2^-40 of itself before it is
// rounded.
__attribute__((always_inline)) inline float exponential(float x) {
  double wide = x;
  wide = wide < kLeastExponent ? kLeastExponent : wide;
  const double shifted = wide * kLog2E + kNoFractions, k = shifted - kNoFractions;
  const double r = (wide - k * kLn2High) - k * kLn2Low;
  double p = 1.0 / 3628800;  // 1 / 10!
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  const double power = from_bits((bits_of(shifted) - bits_of(kNoFractions) + 1023) << 52);  // 2^k
  return static_cast<float>(p * power);
}

// log(x) for finite x above 0, off by less than 2^-40; NaN for NaN.
inline double logarithm(float x) {
  if (!(x > 0)) return from_bits(0x7FF8000000000000);
  const uint64_t bits = bits_of(x), mantissa = bits & 0xFFFFFFFFFFFFF;
  auto exponent = static_cast<double>(static_cast<int64_t>(bits >> 52) - 1023);
  double f = from_bits(mantissa | 0x3FF0000000000000);  // 1 to 2
  if (f > 1.4142135623730951) f = f * 0.5, exponent = exponent + 1.0;
  const double s = (f - 1.0) / (f + 1.0),
               square = s * s;  // log f = 2 (s + s^3 / 3 + s^5 / 5 + ...)
  double sum = 1.0 / 17;
  for (const double term :
       {1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3, 1.0}) {
    sum = sum * square + term;
  }
  return exponent * 0.6931471805599453 + 2.0 * s * sum;
}

}  // namespace espnx::accelerator
