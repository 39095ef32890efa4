// One query's way through a graph on storage: which page it wants next, and what it learns from those that arrive.
// Knows nothing of how they are read.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "codebook.hpp"
#include "page.hpp"

namespace espnx::graph {

// What every walk over a graph shares.
struct GraphView {
  PageLayout layout;
  Metric metric = Metric::kL2;
  Codebook book;
  Codebook disk_book;              // of the codes that nodes have in place of vectors, where they do
  const uint8_t* codes = nullptr;  // [n, code_bytes] of all nodes, where they are in memory; else null
  std::shared_ptr<void> codes_owner;
  std::vector<uint32_t> entries;     // walks begin at the one that is nearest by its code
  std::vector<uint8_t> entry_codes;  // [entries, code_bytes]
};

struct WalkOptions {
  int64_t k = 10;
  int64_t list_size = 100;  // L
  int64_t beam = 1;         // W: pages under way at a time
  // Ends when the nearest candidate left is farther than the k-th nearest vector by this share of its distance,
  // squared. Infinity: never before the list is done.
  float stop_beyond = std::numeric_limits<float>::infinity();
};

struct WalkCosts {
  int64_t pages = 0, code_pages = 0, distances = 0, estimates = 0;
};

// A page that a walk wants.
struct Want {
  bool is_codes;  // of codes, and not of nodes
  int64_t page;
};

struct Found {
  float distance;
  uint32_t row;
  bool operator<(const Found& other) const {
    return distance != other.distance ? distance < other.distance : row < other.row;
  }
};

// Numbers of nodes, or of pages: open addressing, so that forgetting them is one memset.
class NodeSet {
 public:
  void clear();
  bool add(uint32_t node);  // false: it is there
  bool has(uint32_t node) const;

 private:
  void grow();
  std::vector<uint32_t> slots_;  // node + 1, or 0
  size_t count_ = 0;
};

class GraphWalk {
 public:
  // `query`: as DistanceQuery takes it, and as float32. `allowed`: a bit for each row that may be found, or null: all.
  void begin(const GraphView& view, const WalkOptions& options, const void* query, const float* query_f32,
             const uint8_t* allowed);

  // The page to read next, unless so many are under way, or nothing is left to read. It is under way from here on.
  // Where codes are paged, those of a node's neighbours come before anything else: which node is next depends on them.
  std::optional<Want> next_page();

  // A page of nodes that was asked for, checked.
  void arrived(int64_t page, const uint8_t* bytes);

  // A page of codes that was asked for, checked. `was_read`: or it was in memory, and counts for nothing.
  void codes_arrived(int64_t page, const uint8_t* bytes, bool was_read);

  // Nothing is left, and nothing under way.
  bool done() const { return under_way_.empty() && code_pages_.empty() && first_waiting() == list_.size(); }

  // The k nearest of all vectors that were measured, nearest first, ties by row.
  std::vector<Found> results();

  // The same, of those that were measured so far, and the walk goes on.
  std::vector<Found> nearest() const;

  const WalkCosts& costs() const { return costs_; }

 private:
  struct Candidate {
    float distance;
    uint32_t node;
    bool waits;  // for its page
    bool operator<(const Candidate& other) const {
      return distance != other.distance ? distance < other.distance : node < other.node;
    }
  };

  size_t first_waiting() const;
  bool add_candidate(Candidate candidate);  // false: it is too far
  bool stop_waiting(uint32_t node);         // false: it is not in the list
  void expand(const NodeView& node);
  void estimate_fresh();  // and makes candidates of them
  void keep(float distance, uint32_t row);

  const GraphView* view_ = nullptr;
  WalkOptions options_;
  const uint8_t* allowed_ = nullptr;
  void measure(int64_t count);  // distance_ of what lies at rows_

  std::optional<DistanceQuery> exact_;  // or, of codes in place of vectors:
  std::vector<float> disk_table_;
  std::vector<float> table_;
  std::vector<Candidate> list_;  // nearest first
  NodeSet met_;                  // nodes that were candidates, or measured
  NodeSet read_;                 // pages that have arrived
  std::vector<Found> nearest_;   // a heap, the farthest on top
  std::vector<int64_t> under_way_;
  struct CodePage {
    int64_t page;
    bool asked;
    std::vector<uint32_t> nodes;  // whose codes it has
  };
  std::vector<CodePage> code_pages_;  // that neighbours wait for
  WalkCosts costs_;
  std::vector<const uint8_t*> rows_, fresh_codes_;  // scratch
  std::vector<uint32_t> fresh_;
  std::vector<float> distance_;
  std::vector<float> estimate_;
};

}  // namespace espnx::graph
