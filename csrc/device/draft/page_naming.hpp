// Attention over stored rows that names the pages which weigh most on the way, and keeps those: the
// rows that a draft attends to (espnx/kv/draft/pages.py says which and why).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
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

// Takes rows in any order, in several threads at once. Which pages stay depends on the order in
// which they are offered: in several threads that is the order of the reads, whichever comes first,
// so that the same rows name the same pages.
class PageNaming {
 public:
  // Everything that the arguments point to must live as long as this.
  // `place`: [sequences of the queries], which sequence of the slots each is; -1: none of its pages
  // are kept. `end`: the position behind the last of the rows that will come.
  PageNaming(const RowQueries& queries, const RowGeometry& geometry, const PageSlots& slots,
             const int64_t* place, int64_t end, int n_threads);

  // Reads are numbered from 0 again.
  void begin_reads();

  // Rows that a read has brought. `thread`: below `n_threads`, no two at once with the same.
  // `read`: its number, of which none may be left out; -1: it is offered at once. `is_over` is
  // asked while others that come before it are waited for: true gives up. Throws FailureError where
  // the pieces do not fit the memory or the queries, and what `is_over` throws.
  void see(const RowPiece* pieces, int64_t count, const char* memory, int64_t memory_bytes,
           int thread = 0, int64_t read = -1, const std::function<bool()>& is_over = nullptr);

  // The attention over all rows so far: o [sequences, heads, n, dv], lse [sequences, heads, n].
  void finish(float* o, float* lse);

  int n_threads() const { return static_cast<int>(own_.size()); }
  const RowQueries& queries() const { return queries_; }

 private:
  struct Own {                          // of a thread
    std::vector<float> o, m, l;         // [sequences, heads, n, (dv)]; empty before the first
    std::vector<float> part_o;          // [n, dv], of the piece at hand
    std::vector<float> part_m, part_l;  // [pieces, n], of the read at hand
    std::vector<float> sum, base;       // [pages of all its pieces, n]
  };
  struct Piece;
  struct Slot;

  void check(const RowPiece& piece, int64_t memory_bytes) const;
  void attend(const RowPiece& piece, const AttentionRows& rows, const AttentionState& part,
              const PageSums& pages, Own& own) const;
  bool wait_for_turn(int64_t read, const std::function<bool()>& is_over);
  void name(const RowPiece& piece, const AttentionRows& rows, const AttentionState& part,
            const PageSums& pages);
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
  std::vector<int64_t> begins_;  // page in which each sequence's text begins
  std::vector<float> total_;     // [sequences, heads, n]: log-sum-exp of all that has come
  std::vector<Own> own_;
  std::mutex mutex_;  // guards the slots, the totals, and whose turn it is
  std::condition_variable advanced_;
  int64_t turn_ = 0;
};

}  // namespace espnx::device
