// The Vamana graph (DiskANN, section 2): every node points to at most R others, chosen so that a
// walk which always goes to the nearest neighbour comes to any vector from anywhere in few steps.
//
// Nodes are inserted in random order by several threads at once. Each is looked for in the graph as
// it is by then; what the walk has passed is pruned to the node's neighbours, and each of those
// gets an edge back.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_set>
#include <vector>

#include "cpu/distances/distances.hpp"
#include "robust_prune.hpp"

namespace espnx::graph {

struct VamanaOptions {
  int64_t degree = 64;      // R
  int64_t list_size = 100;  // L
  float alpha = 1.2f;  // an edge is left out where another neighbour is nearer to its end by this
                       // factor, squared
  int passes = 1;      // of insertion; all but the last with alpha 1
  bool saturate =
      true;  // fill up with the nearest that were left out: a page has room for R anyway
  int threads = 1;
  uint64_t seed = 0;
};

class Vamana {
 public:
  // By the squared Euclidean distance. `vectors` must outlive it.
  Vamana(VectorTable vectors, VamanaOptions options);

  // Inserts all nodes. `progress(done, total)` is called from the calling thread about ten times a
  // second; false ends the build early, and build() returns false.
  bool build(const std::function<bool(int64_t, int64_t)>& progress);

  // Instead of build(): the edges of a graph that is there already. Of each node's `degree` places
  // the first counts[i] are its neighbours; every number is below n, and every count at most the
  // degree.
  void set_edges(const uint32_t* neighbours, const int64_t* counts, uint32_t medoid);

  // Instead of build(): a graph that grows. `vectors` takes the place of those before, the first of
  // which it has too, wherever they lie; insert_to() inserts what follows of it up to node end - 1,
  // in the order of their numbers, so that the graph of some first nodes is always the same. One
  // thread at a time, and no walk meanwhile.
  void hold(VectorTable vectors);
  void insert_to(int64_t end);
  int64_t inserted() const { return inserted_; }
  int64_t size_bytes() const;

  struct Scratch;  // of a thread
  using ScratchPtr = std::unique_ptr<Scratch, void (*)(Scratch*)>;
  ScratchPtr make_scratch() const;
  // What a walk to a query finds that keeps so many, nearest first; valid until the scratch is used
  // again. `measured` becomes more by the distances that it took.
  const std::vector<Near>& nearest(const DistanceQuery& query, int64_t list_size, Scratch& scratch,
                                   int64_t& measured);

  // Gives every node that no walk from `entries` can come to an edge from a near one that can be
  // come to, and returns how many there were.
  int64_t connect(const std::vector<uint32_t>& entries);

  // For each node whether a walk along edges can come from it to `node`.
  std::vector<char> leading_to(uint32_t node) const;

  // The vector nearest to the mean of all, where insertion begins its walks; or what set_edges was
  // told.
  uint32_t medoid() const { return medoid_; }

  int64_t degree_of(int64_t node) const { return degree_[node]; }
  const uint32_t* neighbours_of(int64_t node) const { return edges_.data() + node * capacity_; }

 private:
  uint32_t find_medoid() const;
  // The distances of scratch.target to nodes, in scratch.distance.
  void measure(const std::vector<uint32_t>& nodes, Scratch& scratch) const;
  void add_to_pool(const std::vector<uint32_t>& nodes, Scratch& scratch) const;
  // What a walk to scratch.target expands, in scratch.passed; `scratch.list` holds the nearest.
  void walk(uint32_t begin, int64_t list_size, Scratch& scratch);
  // Of the pool those that remain, at most R; valid until the scratch is used again.
  const std::vector<Near>& prune(uint32_t node, float alpha, Scratch& scratch) const;
  void insert(uint32_t node, float alpha, Scratch& scratch);
  void link_back(uint32_t from, uint32_t to, float distance, float alpha, Scratch& scratch);
  void set_neighbours(uint32_t node, const std::vector<Near>& chosen);
  void copy_neighbours(uint32_t node, std::vector<uint32_t>& out);
  void trim(uint32_t node, Scratch& scratch);
  bool splice(uint32_t from, uint32_t lost, bool any, std::unordered_set<uint64_t>& made);

  void lock(uint32_t node) {
    while (locks_[node].test_and_set(std::memory_order_acquire)) {
    }
  }
  void unlock(uint32_t node) { locks_[node].clear(std::memory_order_release); }

  VectorTable vectors_;
  VamanaOptions options_;
  int64_t capacity_;  // of a node's neighbours while the graph is built: some more than R, so that
                      // it is pruned seldom
  int64_t inserted_ = 0;  // of a graph that grows
  uint32_t medoid_ = 0;
  std::vector<uint32_t> edges_;
  std::vector<uint16_t> degree_;
  std::unique_ptr<std::atomic_flag[]> locks_;
};

}  // namespace espnx::graph
