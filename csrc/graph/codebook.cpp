// See codebook.hpp.
#include "codebook.hpp"

namespace espnx::graph {
namespace {

// Codes whose sums are in flight at a time: one sum's additions would wait for each other.
constexpr int64_t kTile = 8;

}  // namespace

void fill_table(const Codebook& book, const float* query, Metric metric, float* table) {
  const int64_t dim = book.begin.back();
  for (int64_t part = 0; part < book.parts(); ++part) {
    for (int64_t c = 0; c < kCentroids; ++c) {
      const float* centroid = book.centroids.data() + c * dim;
      float sum = 0;
      for (int64_t k = book.begin[part]; k < book.begin[part + 1]; ++k) {
        const float difference = query[k] - centroid[k];
        sum += metric == Metric::kL2 ? difference * difference : -query[k] * centroid[k];
      }
      table[part * kCentroids + c] = sum;
    }
  }
}

void estimate(const float* table, int64_t parts, const uint8_t* const* codes, int64_t n, float* out) {
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
