// See codebook.hpp.
#include "codebook.hpp"

#include <algorithm>

#include "cpu/cpu_level.hpp"

namespace espnx::graph {
namespace {

// Codes whose sums are in flight at a time: one sum's additions would wait for each other.
constexpr int64_t kTile = 8;

// row[c] += a query value's part of the distance to each centroid. Products are rounded before they
// are added, on every processor: no instruction does both here.
template <Metric kMetric>
inline __attribute__((always_inline)) void add_dimension(float value, const float* column,
                                                         float* row) {
  for (int64_t c = 0; c < kCentroids; ++c) {
    const float difference = value - column[c];
    row[c] += kMetric == Metric::kL2 ? difference * difference : -value * column[c];
  }
}

// out[i] += value * row[i], rounded likewise.
inline __attribute__((always_inline)) void add_scaled(float value, const float* row, int64_t n,
                                                      float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] += value * row[i];
}

using AddDimension = void (*)(float value, const float* column, float* row);
using AddScaled = void (*)(float value, const float* row, int64_t n, float* out);

void add_scaled_portable(float value, const float* row, int64_t n, float* out) {
  add_scaled(value, row, n, out);
}

template <Metric kMetric>
void add_portable(float value, const float* column, float* row) {
  add_dimension<kMetric>(value, column, row);
}

#if defined(__x86_64__)
template <Metric kMetric>
__attribute__((target("avx2"))) void add_avx2(float value, const float* column, float* row) {
  add_dimension<kMetric>(value, column, row);
}

__attribute__((target("avx2"))) void add_scaled_avx2(float value, const float* row, int64_t n,
                                                     float* out) {
  add_scaled(value, row, n, out);
}
#endif

template <Metric kMetric>
AddDimension in_force() {
#if defined(__x86_64__)
  if (cpu_level() >= CpuLevel::kAvx2) return add_avx2<kMetric>;
#endif
  return add_portable<kMetric>;
}

std::vector<float> rotate(const float* rotation, const float* query, int64_t dim) {
  AddScaled add = add_scaled_portable;
#if defined(__x86_64__)
  if (cpu_level() >= CpuLevel::kAvx2) add = add_scaled_avx2;
#endif
  std::vector<float> rotated(dim);
  for (int64_t k = 0; k < dim; ++k) add(query[k], rotation + k * dim, dim, rotated.data());
  return rotated;
}

}  // namespace

Codebook::Codebook(std::vector<int64_t> begin_of_parts, const float* centroids)
    : begin(std::move(begin_of_parts)) {
  const int64_t dim = begin.back();
  columns.resize(dim * kCentroids);
  for (int64_t k = 0; k < dim; ++k) {
    for (int64_t c = 0; c < kCentroids; ++c) columns[k * kCentroids + c] = centroids[c * dim + k];
  }
}

void fill_table(const Codebook& book, const float* query, Metric metric, float* table) {
  const AddDimension add =
      metric == Metric::kL2 ? in_force<Metric::kL2>() : in_force<Metric::kIp>();
  std::vector<float> rotated;
  if (book.rotation != nullptr) {
    rotated = rotate(book.rotation, query, book.begin.back());
    query = rotated.data();
  }
  std::fill(table, table + book.parts() * kCentroids, 0.0f);
  for (int64_t part = 0; part < book.parts(); ++part) {
    for (int64_t k = book.begin[part]; k < book.begin[part + 1]; ++k) {
      add(query[k], book.columns.data() + k * kCentroids, table + part * kCentroids);
    }
  }
}

void estimate(const float* table, int64_t parts, const uint8_t* const* codes, int64_t n,
              float* out) {
  for (; n >= kTile; n -= kTile, codes += kTile, out += kTile) {
    float sums[kTile] = {};
    for (int64_t part = 0; part < parts; ++part) {
      const float* row = table + part * kCentroids;
      for (int64_t t = 0; t < kTile; ++t) sums[t] += row[codes[t][part]];
    }
    for (int64_t t = 0; t < kTile; ++t) out[t] = sums[t];
  }
  for (int64_t i = 0; i < n; ++i) {
    float sum = 0;
    for (int64_t part = 0; part < parts; ++part) sum += table[part * kCentroids + codes[i][part]];
    out[i] = sum;
  }
}

}  // namespace espnx::graph
