// Which numbers the fast paths take: what is left over goes the plain fp32 way, with its infinities
// and NaNs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace espnx {

// Beyond these, products and what is made of them come near the ends of fp32's range.
constexpr float kSmallestPeak = 1e-15f, kLargestValue = 1e15f;
// With fewer query tokens a strip is mostly padding, and the fp32 path has a kernel for that.
constexpr int64_t kMinStripTokens = 3;

// Whether a row's values are finite, none is too large, and its largest is not tiny (a row of zeros
// is fine).
inline bool is_ordinary(const float* values, int64_t n) {
  float peak = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    if (!(std::fabs(values[i]) <= kLargestValue)) return false;  // a NaN too
    peak = std::max(peak, std::fabs(values[i]));
  }
  return peak == 0.0f || peak >= kSmallestPeak;
}

}  // namespace espnx
