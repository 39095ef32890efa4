// Attention in plain C++: a vector is an array of eight floats, whose loops the compiler turns into
// what its baseline has.
#include <cfloat>
#include <cmath>
#include <cstring>

#include "cpu/formats/half.hpp"
#include "cpu/formats/scale.hpp"
#include "kernels.hpp"

#define ESPNX_LEVEL

namespace espnx {
namespace {

constexpr int kWidth = 8, kScoreQueries = 1, kRowTile = 4, kSumVectors = 4;
constexpr bool kIsFused = false;

struct Vec {
  float lane[kWidth];
};

template <typename Function>
inline Vec each(const Function& function) {
  Vec out;
  for (int i = 0; i < kWidth; ++i) out.lane[i] = function(i);
  return out;
}

inline Vec v_set1(float value) {
  return each([&](int) { return value; });
}
inline Vec v_load(const float* p) {
  return each([&](int i) { return p[i]; });
}
inline void v_store(float* p, const Vec& a) { std::memcpy(p, a.lane, sizeof(a.lane)); }
inline Vec v_add(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline Vec v_sub(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline Vec v_mul(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline Vec v_div(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.lane[i] / b.lane[i]; });
}
inline Vec v_signed_as(const Vec& a,
                       const Vec& sign) {  // a, which is not negative, with the sign of the other
  return each([&](int i) { return std::copysign(a.lane[i], sign.lane[i]); });
}
inline Vec v_fma(const Vec& a, const Vec& b, const Vec& c) {
  return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
}
inline Vec v_max(const Vec& a, const Vec& b) {  // b where either is NaN
  return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}

// To the nearest whole number, for |a| below 2^22: there a float this large has no room for
// fractions.
inline Vec v_round(const Vec& a) {
  constexpr float kNoFractions = 12582912.0f;
  return each([&](int i) { return (a.lane[i] + kNoFractions) - kNoFractions; });
}

// d is a multiple of 8: a row has no half vector. The body asks for these where vectors are wider.
inline Vec v_load_half(const float* p) { return v_load(p); }
inline void v_store_half(float* p, const Vec& a) { v_store(p, a); }

// a * 2^power, power from -126 to 0. A NaN in `a` stays one.
inline Vec v_scale(const Vec& a, const Vec& power) {
  return each([&](int i) {
    const int32_t whole = power.lane[i] >= -126.0f ? static_cast<int32_t>(power.lane[i]) : 0;
    const uint32_t bits = static_cast<uint32_t>(whole + 127) << 23;
    float factor;
    std::memcpy(&factor, &bits, sizeof(factor));
    return a.lane[i] * factor;
  });
}

// `value`, but 0 where x < limit; a NaN is not below anything.
inline Vec v_zero_below(const Vec& x, const Vec& limit, const Vec& value) {
  return each([&](int i) { return x.lane[i] < limit.lane[i] ? 0.0f : value.lane[i]; });
}

inline float v_sum(const Vec& a) {
  const float* p = a.lane;
  return ((p[0] + p[4]) + (p[1] + p[5])) + ((p[2] + p[6]) + (p[3] + p[7]));
}

inline void v_sum4(const Vec& a, const Vec& b, const Vec& c, const Vec& d, float* out) {
  out[0] = v_sum(a), out[1] = v_sum(b), out[2] = v_sum(c), out[3] = v_sum(d);
}

inline float v_largest(const Vec& a) {
  float best = a.lane[0];
  for (int i = 1; i < kWidth; ++i) best = a.lane[i] > best ? a.lane[i] : best;
  return best;
}

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

template <RowFormat kFormat>
inline Vec v_decode(const uint8_t* row, int64_t k) {
  Vec out;
  if (kFormat == RowFormat::fp32) {
    std::memcpy(out.lane, row + 4 * k, sizeof(out.lane));
  } else if (kFormat == RowFormat::int8) {
    for (int i = 0; i < kWidth; ++i)
      out.lane[i] = static_cast<float>(static_cast<int8_t>(row[k + i]));
  } else {
    uint16_t half[kWidth];
    std::memcpy(half, row + 2 * k, sizeof(half));
    for (int i = 0; i < kWidth; ++i) {
      if (kFormat == RowFormat::bf16) {
        out.lane[i] = from_bits(static_cast<uint32_t>(half[i]) << 16);
      } else {
        out.lane[i] = half_to_float(half[i]);
      }
    }
  }
  return out;
}

template <RowFormat kFormat>
inline Vec v_decode_half(const uint8_t* row, int64_t k) {
  return v_decode<kFormat>(row, k);
}

#include "body.hpp"

}  // namespace

const AttentionKernels kAttentionPortable = kTable;

}  // namespace espnx
