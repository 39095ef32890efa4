// Robust pruning (DiskANN, algorithm 2): which of a node's candidates become its neighbours. One is
// left out where a chosen one is nearer to it than the node is, by a factor that grows from 1 to
// alpha, so that near neighbours are chosen before far ones.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/distances/distances.hpp"

namespace espnx::graph {

// Vectors in memory, one after the other; borrowed.
struct VectorTable {
  const uint8_t* data;
  int64_t n, dim;
  VectorFormat format;

  const uint8_t* row(int64_t i) const { return data + i * dim * value_bytes(format); }
};

struct Near {
  float distance;
  uint32_t node;
  bool operator<(const Near& other) const {
    return distance != other.distance ? distance < other.distance : node < other.node;
  }
};

// The most candidates that are pruned to the neighbours of a node: the nearest.
constexpr int64_t kPrunedCandidates = 750;

struct PruneRule {
  int64_t degree;  // neighbours, at most
  float alpha;     // compared with ratios of squared distances
  bool saturate;   // fill up with the nearest that were left out
};

// One thread's, with the memory that it needs again and again.
class RobustPrune {
 public:
  RobustPrune(int64_t dim, VectorFormat format) : block_(dim, format, Metric::kL2) {}

  // Candidates, rows of `vectors`, each with its squared distance from the node, in any order, some
  // of them several times. Those that remain, in the order in which they were chosen; valid until
  // the next call.
  const std::vector<Near>& choose(std::vector<Near>& candidates, const VectorTable& vectors,
                                  const PruneRule& rule);

 private:
  DistanceBlock block_;  // of the candidates
  std::vector<Near> chosen_;
  std::vector<float> occlusion_, distance_;
  std::vector<uint32_t> left_;
  std::vector<const uint8_t*> rows_;
};

// Of many nodes: `targets` [m, dim] are where they lie, candidates[i * width + j] the rows of
// `vectors` that node i may get, or -1. Writes neighbours[m, degree], -1 behind the last. Both
// tables are of one format.
void prune_all(const VectorTable& targets, const int64_t* candidates, int64_t width,
               const VectorTable& vectors, const PruneRule& rule, int threads, int64_t* neighbours);

}  // namespace espnx::graph
