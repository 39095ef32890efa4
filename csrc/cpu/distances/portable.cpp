// Distances in plain C++: what the other levels must equal, bit for bit in whole numbers.
#include "cpu/formats/half.hpp"
#include "kernels.hpp"

namespace espnx {
namespace {

constexpr int64_t kSums =
    8;  // floating-point sums side by side, which a compiler can make vectors of

float real_value(const uint8_t* row, int64_t k, VectorFormat format) {
  if (format != VectorFormat::kFp32) {
    uint16_t half;
    std::memcpy(&half, row + k * 2, sizeof(half));
    return format == VectorFormat::kFp16 ? half_to_float(half) : bf16_to_float(half);
  }
  float value;
  std::memcpy(&value, row + k * 4, sizeof(value));
  return value;
}

template <VectorFormat kFormat, Metric kMetric>
float measure_whole(const int16_t* query, const uint8_t* row, int64_t d) {
  int32_t sum = 0;
  for (int64_t k = 0; k < d; ++k) {
    const int32_t value = kFormat == VectorFormat::kUint8 ? row[k] : static_cast<int8_t>(row[k]);
    const int32_t difference = query[k] - value;
    sum += kMetric == Metric::kL2 ? difference * difference : query[k] * value;
  }
  return static_cast<float>(sum);
}

template <VectorFormat kFormat, Metric kMetric>
float measure_real(const float* query, const uint8_t* row, int64_t d) {
  float sums[kSums] = {};
  int64_t k = 0;
  const auto add = [&](int64_t lane) {
    const float value = real_value(row, k + lane, kFormat), difference = query[k + lane] - value;
    sums[lane] += kMetric == Metric::kL2 ? difference * difference : query[k + lane] * value;
  };
  for (; k + kSums <= d; k += kSums) {
    for (int64_t lane = 0; lane < kSums; ++lane) add(lane);
  }
  for (int64_t lane = 0; lane < d - k; ++lane) add(lane);
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

template <VectorFormat kFormat, Metric kMetric>
void measure(const void* query, const uint8_t* const* rows, int64_t n, int64_t d, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    const float total =
        is_whole(kFormat)
            ? measure_whole<kFormat, kMetric>(static_cast<const int16_t*>(query), rows[i], d)
            : measure_real<kFormat, kMetric>(static_cast<const float*>(query), rows[i], d);
    out[i] = kMetric == Metric::kIp ? 0.0f - total : total;  // 0 - 0 is 0, and not -0
  }
}

template <VectorFormat kFormat>
constexpr DistanceKernel kL2Of = measure<kFormat, Metric::kL2>;
template <VectorFormat kFormat>
constexpr DistanceKernel kIpOf = measure<kFormat, Metric::kIp>;

}  // namespace

const DistanceTable kDistancesPortable = {
    {{kL2Of<VectorFormat::kUint8>, kIpOf<VectorFormat::kUint8>},
     {kL2Of<VectorFormat::kInt8>, kIpOf<VectorFormat::kInt8>},
     {kL2Of<VectorFormat::kFp16>, kIpOf<VectorFormat::kFp16>},
     {kL2Of<VectorFormat::kFp32>, kIpOf<VectorFormat::kFp32>},
     {kL2Of<VectorFormat::kBf16>, kIpOf<VectorFormat::kBf16>}}};

}  // namespace espnx
