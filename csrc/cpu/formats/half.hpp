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

// bfloat16, the upper half of binary32.
inline float bf16_to_float(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace espnx
