// Scales of int8 rows.
#pragma once

#include <cstdint>
#include <cstring>

namespace espnx {

// A scale that is not finite as NaN: otherwise an infinite one would make infinities of a row's
// codes in one kernel and NaNs in another, as the order of products has it.
inline float scale_or_nan(float scale) { return scale + (scale - scale); }

// Scale number i at any address.
inline float scale_at(const uint8_t* bytes, int64_t i) {
  float scale;
  std::memcpy(&scale, bytes + 4 * i, sizeof(scale));
  return scale_or_nan(scale);
}

}  // namespace espnx
