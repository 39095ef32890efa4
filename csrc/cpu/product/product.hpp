// Product quantisation: vectors are cut in parts of any widths, and each part is named by the
// nearest of its 256 centroids. Training is k-means of each part by itself.
#pragma once

#include <cstdint>
#include <vector>

namespace espnx {

constexpr int64_t kCentroids = 256;

// Vectors of dim values, one after the other. Part p has the dimensions [begin[p], begin[p + 1]).
struct ProductParts {
  int64_t dim;
  std::vector<int64_t> begin;  // [parts + 1], growing, from 0 to dim

  int64_t count() const { return static_cast<int64_t>(begin.size()) - 1; }
};

// Centroids [256, dim] of n vectors, n at least 1: Lloyd's k-means from 256 vectors drawn by
// `seed`, at most `rounds` of it, or until no vector changes its centroid. The same bits for any
// number of threads.
void fit_product(const ProductParts& parts, const float* vectors, int64_t n, int rounds,
                 uint64_t seed, int threads, float* centroids);

// out[n, parts]: the nearest centroid of each part, of several as near the first.
void encode_product(const ProductParts& parts, const float* centroids, const float* vectors,
                    int64_t n, int threads, uint8_t* out);

}  // namespace espnx
