// Distances of one query to many vectors that lie in place in an I/O buffer, anywhere in it:
//   l2: sum over k of (q[k] - v[k])^2          ip: - sum over k of q[k] v[k]
// The smaller, the nearer, in both. Of whole numbers (uint8, int8) the sum is exact in int32 and
// rounded once, to fp32; of fp16, bf16 and fp32 every operation is fp32's.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace espnx {

enum class VectorFormat : int { kUint8 = 0, kInt8, kFp16, kFp32, kBf16 };
constexpr int kVectorFormats = 5;
constexpr const char* kVectorFormatNames[kVectorFormats] = {"uint8", "int8", "fp16", "fp32",
                                                            "bf16"};

enum class Metric : int { kL2 = 0, kIp };
constexpr int kMetrics = 2;
constexpr const char* kMetricNames[kMetrics] = {"l2", "ip"};

// The largest sum of squares, 255^2 in each dimension, is below 2^31 here: no sum of whole numbers
// overflows.
constexpr int64_t kMaxVectorDim = 32768;

// The number of `name` among `names`, or -1.
template <int kCount>
int number_of(const char* const (&names)[kCount], const char* name) {
  for (int i = 0; i < kCount; ++i) {
    if (std::strcmp(names[i], name) == 0) return i;
  }
  return -1;
}

// Whether values are whole numbers. Queries to such vectors are of their format; to others, of
// fp32.
constexpr bool is_whole(VectorFormat format) {
  return format == VectorFormat::kUint8 || format == VectorFormat::kInt8;
}

constexpr int64_t value_bytes(VectorFormat format) {
  return is_whole(format) ? 1 : format == VectorFormat::kFp32 ? 4 : 2;
}

// A query as the kernels of the level in force want it: widened, and padded with zeros.
class DistanceQuery {
 public:
  // `values`: d of them, 1..kMaxVectorDim; uint8 or int8 for such vectors, fp32 for others.
  DistanceQuery(const void* values, int64_t d, VectorFormat format, Metric metric);

  // Zeros, until assign() makes it a vector as it is stored, of that format, and then another one.
  DistanceQuery(int64_t d, VectorFormat format, Metric metric);
  void assign(const uint8_t* row);

  int64_t vector_bytes() const { return d_ * value_bytes(format_); }

  // out[i] = the distance to the vector at rows[i], at any address; nothing beyond a vector is
  // read. Any thread.
  void measure(const uint8_t* const* rows, int64_t n, float* out) const;

 private:
  int64_t d_;
  VectorFormat format_;
  void (*kernel_)(const void* query, const uint8_t* const* rows, int64_t n, int64_t d, float* out);
  std::vector<int16_t> whole_;
  std::vector<float> real_;
};

// Some vectors beside each other, those of 16 bits widened once: of the distances among them none
// costs more than its sums.
class DistanceBlock {
 public:
  DistanceBlock(int64_t d, VectorFormat format, Metric metric);

  // Takes n vectors in place of those before; `rows` must stay where they are while it is used.
  void assign(const uint8_t* const* rows, int64_t n);

  // out[i] = the distance of vector `from` to vector others[i]. One thread at a time.
  void measure(int64_t from, const uint32_t* others, int64_t n, float* out);

 private:
  DistanceQuery query_;
  int64_t d_;
  VectorFormat format_;
  std::vector<float> wide_;  // [n, d]
  std::vector<const uint8_t*> rows_, wanted_;
};

// out[k] = a vector's values, widened to fp32.
void widen(const uint8_t* row, int64_t d, VectorFormat format, float* out);

struct DistanceVectors {
  const uint8_t* buffer;
  int64_t buffer_bytes;
  const int64_t* offset_bytes;  // [n], any alignment
  int64_t n;
};

// The first vector that does not lie wholly inside the buffer, or -1.
int64_t find_vector_outside(const DistanceVectors& vectors, int64_t vector_bytes);

// Writes out[n_queries, n]. Uses at most `max_threads` threads, fewer where the work does not pay
// for them. The vectors must have passed find_vector_outside.
void distances(const DistanceQuery* queries, int64_t n_queries, const DistanceVectors& vectors,
               int max_threads, float* out);

}  // namespace espnx
