// Distances to vectors by their product-quantisation codes: a table of a query's distances to every
// centroid, and sums of its entries.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/distances/distances.hpp"
#include "cpu/product/product.hpp"

namespace espnx::graph {

// Centroids of the parts of a vector. Part p has the dimensions [begin[p], begin[p + 1]).
struct Codebook {
  std::vector<int64_t> begin;  // [parts + 1]
  std::vector<float> columns;  // [dim, 256]: of each dimension the values of all centroids
  // [dim, dim], where parts are of rotated vectors: row k is what a vector's value k adds, times
  // itself; else null.
  const float* rotation = nullptr;
  std::shared_ptr<void> rotation_owner;

  Codebook() = default;
  // `centroids`: [256, dim].
  Codebook(std::vector<int64_t> begin, const float* centroids);

  int64_t parts() const { return static_cast<int64_t>(begin.size()) - 1; }
};

// Writes table[parts, 256]: a query's part of the distance to each centroid.
void fill_table(const Codebook& book, const float* query, Metric metric, float* table);

// out[i] = the sum of a code's entries, for n codes anywhere.
void estimate(const float* table, int64_t parts, const uint8_t* const* codes, int64_t n,
              float* out);

}  // namespace espnx::graph
