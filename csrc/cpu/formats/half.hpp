// Floats of 16 bits.
#pragma once

#include <cstdint>
#include <cstring>

namespace espnx {

// IEEE binary16 to binary32, exactly, subnormals, infinities and NaNs included.
inline float half_to_float(uint16_t half) {
  // Exponent and mantissa at their places in binary32.
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7FFF) << 13;
  float value;
  std::memcpy(&value, &magnitude, sizeof(value));
  value *= 0x1.0p112f;  // 2^(127 - 15), the difference of the exponent biases
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((half & 0x7C00) == 0x7C00) bits |= 0x7F800000;  // infinity or NaN: the exponent is all ones
  bits |= static_cast<uint32_t>(half & 0x8000) << 16;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// binary32 to the nearest binary16, of two the even one.
inline uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7FFFFFFF;
  if (bits > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00);   // NaN
  if (bits >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);  // 65520 and more: infinity
  if (bits < 0x38800000) {  // subnormal: the last bit of 0.5 is the last one of those
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof(bits));
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, sizeof(bits));
    return static_cast<uint16_t>(sign | (bits - 0x3F000000));
  }
  bits += 0x0FFF + ((bits >> 13) & 1);
  return static_cast<uint16_t>(sign | ((bits - 0x38000000) >> 13));
}

// binary32 to the nearest bfloat16, of two the even one.
inline uint16_t float_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0;  // NaN
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// bfloat16, the upper half of binary32.
inline float bf16_to_float(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace espnx
