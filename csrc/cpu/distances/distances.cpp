// See distances.hpp.
#include "distances.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>

#include "cpu/cpu_level.hpp"
#include "cpu/formats/half.hpp"
#include "cpu/parallel.hpp"
#include "kernels.hpp"

namespace espnx {
namespace {

constexpr int64_t kAtOnce = 64;  // vectors whose addresses are handed to a kernel
// 0.2 ms at 10 GB/s of vectors: ten times the cost of starting a thread.
constexpr int64_t kBytesPerThread = 2 << 20;

const DistanceTable& table_in_force(VectorFormat format) {
#if defined(__x86_64__)
  switch (cpu_level()) {
    case CpuLevel::kAmx:
    case CpuLevel::kVnni: return is_whole(format) ? kDistancesVnni : kDistancesAvx512;
    case CpuLevel::kAvx512: return kDistancesAvx512;
    case CpuLevel::kAvx2: return kDistancesAvx2;
    case CpuLevel::kPortable: break;
  }
#endif
  return kDistancesPortable;
}

#if defined(__x86_64__)
// All but the last few values.
__attribute__((target("avx,f16c"))) int64_t widen_halves(const uint8_t* row, int64_t d,
                                                         float* out) {
  int64_t k = 0;
  for (; k + 8 <= d; k += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * k));
    _mm256_storeu_ps(out + k, _mm256_cvtph_ps(halves));
  }
  return k;
}
#endif

}  // namespace

void widen(const uint8_t* row, int64_t d, VectorFormat format, float* out) {
  int64_t k = 0;
  switch (format) {
    case VectorFormat::kUint8:
      for (; k < d; ++k) out[k] = row[k];
      return;
    case VectorFormat::kInt8:
      for (; k < d; ++k) out[k] = static_cast<int8_t>(row[k]);
      return;
    case VectorFormat::kFp16:
#if defined(__x86_64__)
      if (cpu_level() >= CpuLevel::kAvx2) k = widen_halves(row, d, out);
#endif
      for (; k < d; ++k) {
        uint16_t half;
        std::memcpy(&half, row + 2 * k, sizeof(half));
        out[k] = half_to_float(half);
      }
      return;
    case VectorFormat::kBf16:
      for (; k < d; ++k) {
        uint16_t half;
        std::memcpy(&half, row + 2 * k, sizeof(half));
        out[k] = bf16_to_float(half);
      }
      return;
    case VectorFormat::kFp32: std::memcpy(out, row, d * sizeof(float));
  }
}

DistanceQuery::DistanceQuery(int64_t d, VectorFormat format, Metric metric)
    : d_(d),
      format_(format),
      kernel_(table_in_force(format).of[static_cast<int>(format)][static_cast<int>(metric)]) {
  const int64_t padded = (d + kQueryPad - 1) / kQueryPad * kQueryPad;
  whole_.resize(is_whole(format) ? padded : 0);
  real_.resize(is_whole(format) ? 0 : padded);
}

DistanceQuery::DistanceQuery(const void* values, int64_t d, VectorFormat format, Metric metric)
    : DistanceQuery(d, format, metric) {
  if (real_.empty()) {
    assign(static_cast<const uint8_t*>(values));
  } else {
    std::memcpy(real_.data(), values, d * sizeof(float));
  }
}

void DistanceQuery::assign(const uint8_t* row) {
  if (!real_.empty()) return widen(row, d_, format_, real_.data());
  for (int64_t k = 0; k < d_; ++k) {
    whole_[k] = format_ == VectorFormat::kUint8 ? row[k] : static_cast<int8_t>(row[k]);
  }
}

void DistanceQuery::measure(const uint8_t* const* rows, int64_t n, float* out) const {
  const void* query = whole_.empty() ? static_cast<const void*>(real_.data()) : whole_.data();
  kernel_(query, rows, n, d_, out);
}

DistanceBlock::DistanceBlock(int64_t d, VectorFormat format, Metric metric)
    : query_(DistanceQuery(d, is_whole(format) ? format : VectorFormat::kFp32, metric)),
      d_(d),
      format_(format) {}

void DistanceBlock::assign(const uint8_t* const* rows, int64_t n) {
  rows_.assign(rows, rows + n);
  if (is_whole(format_)) return;
  wide_.resize(n * d_);
  for (int64_t i = 0; i < n; ++i) {
    widen(rows[i], d_, format_, wide_.data() + i * d_);
    rows_[i] = reinterpret_cast<const uint8_t*>(wide_.data() + i * d_);
  }
}

void DistanceBlock::measure(int64_t from, const uint32_t* others, int64_t n, float* out) {
  wanted_.resize(n);
  for (int64_t i = 0; i < n; ++i) wanted_[i] = rows_[others[i]];
  query_.assign(rows_[from]);
  query_.measure(wanted_.data(), n, out);
}

int64_t find_vector_outside(const DistanceVectors& vectors, int64_t vector_bytes) {
  for (int64_t i = 0; i < vectors.n; ++i) {
    const int64_t at = vectors.offset_bytes[i];
    if (at < 0 || vector_bytes > vectors.buffer_bytes || at > vectors.buffer_bytes - vector_bytes)
      return i;
  }
  return -1;
}

void distances(const DistanceQuery* queries, int64_t n_queries, const DistanceVectors& vectors,
               int max_threads, float* out) {
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
      for (int64_t i = 0; i < count; ++i)
        rows[i] = vectors.buffer + vectors.offset_bytes[begin + i];
      for (int64_t q = 0; q < n_queries; ++q)
        queries[q].measure(rows, count, out + q * vectors.n + begin);
    }
  });
}

}  // namespace espnx
