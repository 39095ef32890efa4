// Attention over stored rows that names the pages which weigh most on the way, and keeps those: the
// rows that a draft attends to (espnx/kv/draft/pages.py says which and why).
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "device/row_stream.hpp"

namespace espnx::device {

constexpr int64_t kPageRows = 32;

// The pages of one layer that stay in memory: `slots` of each (sequence, KV head).
struct PageSlots {
  uint8_t *k, *v;    // [sequences, heads, slots, kPageRows, d or dv]
  RowFormat format;  // of both; never int8
  uint8_t* seen;     // [sequences, heads, slots, kPageRows]: which rows are there, and no padding
  float* lse;        // [sequences, heads, slots, n]: of each page for the pass's queries
  uint8_t* stays;    // [sequences, heads, slots]: whatever it weighs
  int64_t* number;   // [sequences, heads, slots]: which page of the text it is; -1: none
  int64_t slots;
};

// Takes rows in any order, in several threads at once.
class PageNaming {
 public:
  // Everything that the arguments point to must live as long as this.
  // `place`: [sequences of the queries], which sequence of the slots each is; -1: none of its pages
  // are kept. `end`: the position behind the last of the rows that will come.
  PageNaming(const RowQueries& queries, const RowGeometry& geometry, const PageSlots& slots,
             const int64_t* place, int64_t end, int n_threads);

  // Rows that a read has brought. `thread`: below `n_threads`, no two at once with the same. Throws
  // FailureError where the pieces do not fit the memory or the queries.
  void see(const RowPiece* pieces, int64_t count, const char* memory, int64_t memory_bytes,
           int thread);

  // The attention over all rows so far: o [sequences, heads, n, dv], lse [sequences, heads, n].
  void finish(float* o, float* lse);

  int n_threads() const { return static_cast<int>(own_.size()); }
  const RowQueries& queries() const { return queries_; }

 private:
  struct Own {  // of a thread
    std::vector<float> o, m, l;              // [sequences, heads, n, (dv)]; empty before the first
    std::vector<float> part_o, part_m, part_l;  // [n, (dv)], of the piece at hand
    std::vector<float> sum, base;            // [pages, n], likewise
  };
  struct Piece;
  struct Slot;

  void check(const RowPiece& piece, int64_t memory_bytes) const;
  void look(const RowPiece& piece, const char* memory, Own& own);
  void offer(const Piece& piece, const Slot& slot);
  int64_t begins(int64_t sequence) const;
  bool is_seen(int64_t sequence, int64_t position) const;
  void copy(const Piece& piece, int64_t row, uint8_t* k, uint8_t* v) const;
  void put(const Piece& piece, int64_t page, const Slot& slot, int64_t at, bool is_new) const;

  const RowQueries queries_;
  const RowGeometry geometry_;
  const PageSlots slots_;
  const std::vector<int64_t> place_;
  const int64_t end_;
  std::vector<int64_t> begins_;        // page in which each sequence's text begins
  std::vector<float> total_;           // [sequences, heads, n]: log-sum-exp of all that has come
  std::vector<std::mutex> of_group_;   // guards the slots and the total of a (sequence, head)
  std::vector<Own> own_;
};

}  // namespace espnx::device
