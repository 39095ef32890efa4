// The best records of a query: its lists are scored term after term within windows of record
// numbers whose sums stay in the second-level cache, and whoever beats the k-th best so far is
// kept. No array of all records is ever filled.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.hpp"
#include "list.hpp"

namespace espnx::postings {

constexpr int64_t kWindowRecords = 65536;

struct Hit {
  float score;
  int64_t number;
};

// The k best: the higher score, and of equal ones the lower number.
class TopK {
 public:
  explicit TopK(int64_t k) : k_(k) {}

  // Scores below it need not be offered; one equal to it may be kept for its number.
  float threshold() const { return threshold_; }
  void offer(float score, int64_t number) {
    if (!(score >= threshold_) || k_ == 0) return;
    hits_.push_back({score, number});
    if (static_cast<int64_t>(hits_.size()) >= 2 * k_ + kSlack) shrink();
  }
  // Best first.
  std::vector<Hit> take();

 private:
  static constexpr int64_t kSlack = 256;
  void shrink();

  int64_t k_;
  float threshold_ = -__builtin_inff();
  std::vector<Hit> hits_;
};

// A segment's records, as far as a scan looks at them.
struct SegmentView {
  ListRules rules;
  const Bm25* bm25 = nullptr;  // of counts
  const uint8_t* allowed =
      nullptr;               // bit i % 8 of byte i / 8: record i may be found; null: all may
  int64_t first_number = 0;  // of record 0, in results
};

// A query's term in a segment. BM25: float32(weight * tf(...) - absent); impacts and floats:
// float32(weight) * value.
struct WeightedList {
  StoredList list;
  double weight;
  double absent;
};

// Memory for scans, used by one thread at a time.
class Scanner {
 public:
  Scanner();

  // Adds a segment's records to `best`: scores are sums in the order of `lists`, in float32, plus
  // `constant`. The lists have passed check_list. False: the numbers of lists[*damaged] are out of
  // order.
  bool scan(const SegmentView& segment, const std::vector<WeightedList>& lists, float constant,
            TopK& best, size_t* damaged);

 private:
  struct Cursor;
  bool scan_windows(const SegmentView& segment, const std::vector<WeightedList>& lists,
                    float constant, TopK& best, size_t* damaged);
  bool fill(Cursor& cursor, const SegmentView& segment);
  void add(const Cursor& cursor, int64_t from, int64_t to, int64_t begin);
  void select(const SegmentView& segment, int64_t begin, float constant, TopK& best);

  std::vector<float> sums_;        // [kWindowRecords]; -0.0: no list had the record
  std::vector<uint16_t> touched_;  // local numbers of records that have a sum
  int64_t n_touched_ = 0;
};

}  // namespace espnx::postings
