// Vectors that were added to a graph and are in none of its pages yet: found by a graph in memory
// that grows, as far as it goes, and beyond it measured one by one.
//
// One version of what was added is its first n vectors, of which some may be found: a search names
// both, so that versions share one graph, whose other nodes walks go by.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "graph/build/vamana.hpp"

namespace espnx::graph {

struct AddedRequest {
  const uint8_t* queries = nullptr;  // [n_queries], of the format of whole numbers, else fp32
  int64_t n_queries = 0, query_bytes = 0;
  int64_t n = 0;                 // vectors of the version
  const uint8_t* may = nullptr;  // [n]: 1: may be found
  const int64_t* ids = nullptr;  // [n]
  int64_t k = 0;
  int64_t list_size = 0;  // of a walk; 0: all are measured
  int threads = 1;
  // What is known already, [n_queries, n_known]; an id below 0 is nobody's.
  const float* known_distances = nullptr;
  const int64_t* known_ids = nullptr;
  int64_t n_known = 0;
  // [n_queries, k]: the nearest of all first, ties by id, infinity and -1 behind the last.
  float* distances = nullptr;
  int64_t* found = nullptr;
  int64_t* measured = nullptr;  // [n_queries]: distances that were taken
};

class AddedGraph {
 public:
  // By `metric`; by the inner product no graph is built.
  AddedGraph(int64_t dim, VectorFormat format, Metric metric, VamanaOptions options);

  // Takes all vectors that there are, which lie at `rows` until it takes others: those before
  // first, as they were. Waits for searches.
  void hold(const uint8_t* rows, int64_t n, std::shared_ptr<void> owner);

  // Inserts the next vectors up to the end-th. Searches wait for some of them at a time.
  void insert_to(int64_t end);

  int64_t held() const;
  int64_t inserted() const;
  int64_t size_bytes() const;
  int64_t dim() const { return dim_; }
  VectorFormat format() const { return format_; }

  // The request's vectors must be held. Any thread.
  void search(const AddedRequest& request);

 private:
  class Best;  // the k nearest so far

  void search_one(const AddedRequest& request, int64_t query, int64_t indexed, int64_t n_may,
                  Vamana::ScratchPtr& scratch, Best& best);
  void scan(const AddedRequest& request, const DistanceQuery& query, int64_t begin, int64_t end,
            int64_t& measured, Best& best) const;

  const int64_t dim_;
  const VectorFormat format_;
  const Metric metric_;
  VectorTable table_;
  std::shared_ptr<void> owner_;
  Vamana graph_;
  mutable std::shared_mutex mutex_;
};

}  // namespace espnx::graph
