// See distances.hpp.
#include "distances.hpp"

#include <algorithm>

#include "cpu/cpu_level.hpp"
#include "cpu/parallel.hpp"
#include "kernels.hpp"

namespace espnx {
namespace {

constexpr int64_t kAtOnce = 64;  // vectors whose addresses are handed to a kernel
// 0.2 ms at 10 GB/s of vectors: ten times the cost of starting a thread.
constexpr int64_t kBytesPerThread = 2 << 20;

const DistanceTable& table_in_force(VectorFormat format) {
#if defined(__x86_64__)
  const bool is_whole = format == VectorFormat::kUint8 || format == VectorFormat::kInt8;
  switch (cpu_level()) {
    case CpuLevel::kAmx:
    case CpuLevel::kVnni: return is_whole ? kDistancesVnni : kDistancesAvx512;
    case CpuLevel::kAvx512: return kDistancesAvx512;
    case CpuLevel::kAvx2: return kDistancesAvx2;
    case CpuLevel::kPortable: break;
  }
#endif
  return kDistancesPortable;
}

}  // namespace

DistanceQuery::DistanceQuery(const void* values, int64_t d, VectorFormat format, Metric metric)
    : d_(d), format_(format), kernel_(table_in_force(format).of[static_cast<int>(format)][static_cast<int>(metric)]) {
  const int64_t padded = (d + kQueryPad - 1) / kQueryPad * kQueryPad;
  if (format == VectorFormat::kUint8 || format == VectorFormat::kInt8) {
    whole_.resize(padded);
    const auto* bytes = static_cast<const uint8_t*>(values);
    for (int64_t k = 0; k < d; ++k) {
      whole_[k] = format == VectorFormat::kUint8 ? bytes[k] : static_cast<int8_t>(bytes[k]);
    }
  } else {
    real_.resize(padded);
    std::memcpy(real_.data(), values, d * sizeof(float));
  }
}

void DistanceQuery::measure(const uint8_t* const* rows, int64_t n, float* out) const {
  const void* query = whole_.empty() ? static_cast<const void*>(real_.data()) : whole_.data();
  kernel_(query, rows, n, d_, out);
}

int64_t find_vector_outside(const DistanceVectors& vectors, int64_t vector_bytes) {
  for (int64_t i = 0; i < vectors.n; ++i) {
    const int64_t at = vectors.offset_bytes[i];
    if (at < 0 || vector_bytes > vectors.buffer_bytes || at > vectors.buffer_bytes - vector_bytes) return i;
  }
  return -1;
}

void distances(const DistanceQuery* queries, int64_t n_queries, const DistanceVectors& vectors, int max_threads,
               float* out) {
  if (n_queries == 0 || vectors.n == 0) return;
  const int64_t vector_bytes = queries[0].vector_bytes();
  // Not multiplied: n vectors may overlap, and their bytes need not fit a number then.
  const int64_t per_thread = std::max<int64_t>(1, kBytesPerThread / vector_bytes / n_queries);
  const int threads = static_cast<int>(std::clamp<int64_t>(vectors.n / per_thread, 1, max_threads));
  const int64_t grain = std::max<int64_t>(kAtOnce, vectors.n / threads / 8);
  parallel_for(vectors.n, grain, threads, [&](int, int64_t begin, int64_t end) {
    const uint8_t* rows[kAtOnce];
    for (; begin < end; begin += kAtOnce) {
      const int64_t count = std::min(kAtOnce, end - begin);
      for (int64_t i = 0; i < count; ++i) rows[i] = vectors.buffer + vectors.offset_bytes[begin + i];
      for (int64_t q = 0; q < n_queries; ++q) queries[q].measure(rows, count, out + q * vectors.n + begin);
    }
  });
}

}  // namespace espnx
