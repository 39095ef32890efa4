// See scan.hpp.
#include "scan.hpp"

#include <algorithm>
#include <cstring>

namespace espnx::postings {
namespace {

// A sum that nothing was added to: x + -0.0 is x, and no sum of numbers other than -0.0 is -0.0.
constexpr float kUntouched = -0.0f;

bool is_untouched(float sum) {
  uint32_t bits;
  std::memcpy(&bits, &sum, sizeof(bits));
  return bits == 0x80000000u;
}

bool is_better(const Hit& a, const Hit& b) {
  return a.score != b.score ? a.score > b.score : a.number < b.number;
}

}  // namespace

void TopK::shrink() {
  if (static_cast<int64_t>(hits_.size()) <= k_) return;
  std::nth_element(hits_.begin(), hits_.begin() + (k_ - 1), hits_.end(), is_better);
  hits_.resize(k_);
  threshold_ = hits_.back().score;
}

std::vector<Hit> TopK::take() {
  if (k_ > 0) shrink();
  std::sort(hits_.begin(), hits_.end(), is_better);
  return std::move(hits_);
}

// A layer that is being read, one block at a time.
struct Scanner::Cursor {
  Cursor(Bytes layer, const WeightedList& from, const ListRules& rules, size_t list)
      : reader(layer, rules), weight(from.weight), absent(from.absent), list(list) {}

  ListReader reader;
  double weight, absent;
  size_t list;
  int64_t n = 0, at = 0;
  uint32_t records[kBlockPostings];
  float scores[kBlockPostings];
};

Scanner::Scanner() : sums_(kWindowRecords, kUntouched), touched_(kWindowRecords + 1) {}

bool Scanner::fill(Cursor& cursor, const SegmentView& segment) {
  uint32_t values[kBlockPostings];
  cursor.n = cursor.reader.next(cursor.records, values);
  cursor.at = 0;
  if (cursor.n <= 0) return cursor.n == 0;
  const int64_t n = cursor.n;
  const auto weight = static_cast<float>(cursor.weight);
  switch (segment.rules.kind) {
    case ValueKind::kCount:
      kernels().bm25(*segment.bm25, cursor.records, values, n, cursor.weight, cursor.absent,
                     cursor.scores);
      break;
    case ValueKind::kImpact:
      for (int64_t i = 0; i < n; ++i)
        cursor.scores[i] = weight * static_cast<float>(static_cast<int32_t>(values[i]));
      break;
    case ValueKind::kFloat:
      for (int64_t i = 0; i < n; ++i) {
        float value;
        std::memcpy(&value, values + i, sizeof(value));
        cursor.scores[i] = weight * value;
      }
      break;
  }
  return true;
}

void Scanner::add(const Cursor& cursor, int64_t from, int64_t to, int64_t begin) {
  float* sums = sums_.data();
  uint16_t* touched = touched_.data();
  int64_t n = n_touched_;
  for (int64_t i = from; i < to; ++i) {
    const auto local = static_cast<uint32_t>(cursor.records[i] - begin);
    touched[n] = static_cast<uint16_t>(local);
    n += is_untouched(sums[local]);
    sums[local] += cursor.scores[i] + 0.0f;  // never -0.0
  }
  n_touched_ = n;
}

void Scanner::select(const SegmentView& segment, int64_t begin, float constant, TopK& best) {
  for (int64_t i = 0; i < n_touched_; ++i) {
    const int64_t local = touched_[i];
    const float score = sums_[local] + constant;
    sums_[local] = kUntouched;
    if (!(score >= best.threshold())) continue;
    const int64_t record = begin + local;
    if (segment.allowed != nullptr && (segment.allowed[record / 8] >> (record % 8) & 1) == 0)
      continue;
    best.offer(score, segment.first_number + record);
  }
  n_touched_ = 0;
}

bool Scanner::scan(const SegmentView& segment, const std::vector<WeightedList>& lists,
                   float constant, TopK& best, size_t* damaged) {
  const bool is_whole = scan_windows(segment, lists, constant, best, damaged);
  for (int64_t i = 0; i < n_touched_; ++i)
    sums_[touched_[i]] = kUntouched;  // of a scan that broke off
  n_touched_ = 0;
  return is_whole;
}

bool Scanner::scan_windows(const SegmentView& segment, const std::vector<WeightedList>& lists,
                           float constant, TopK& best, size_t* damaged) {
  std::vector<Cursor> cursors;
  for (size_t i = 0; i < lists.size(); ++i) {
    for (const Bytes& layer : layers_of(lists[i].list))
      cursors.emplace_back(layer, lists[i], segment.rules, i);
  }
  for (;;) {
    int64_t first = segment.rules.n_records;  // that any list has yet to give
    for (Cursor& cursor : cursors) {
      if (cursor.at == cursor.n && !fill(cursor, segment)) {
        *damaged = cursor.list;
        return false;
      }
      if (cursor.at < cursor.n) first = std::min<int64_t>(first, cursor.records[cursor.at]);
    }
    if (first == segment.rules.n_records) return true;
    const int64_t begin = first / kWindowRecords * kWindowRecords, end = begin + kWindowRecords;
    for (Cursor& cursor : cursors) {
      while (cursor.at < cursor.n && cursor.records[cursor.at] < end) {
        int64_t to = cursor.n;
        if (cursor.records[to - 1] >= end) {
          to = std::lower_bound(cursor.records + cursor.at, cursor.records + to, end) -
               cursor.records;
        }
        add(cursor, cursor.at, to, begin);
        cursor.at = to;
        if (to == cursor.n && !fill(cursor, segment)) {
          *damaged = cursor.list;
          return false;
        }
      }
    }
    select(segment, begin, constant, best);
  }
}

}  // namespace espnx::postings
