// Which of two is nearer, and the nearest that a walk has found.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace espnx::graph {

// Whether the first of two is nearer: the order of all that a walk sorts. By id where distances are
// equal, so that nothing depends on the order in which things come; what is no number is farther
// than all that is.
template <typename Id>
bool is_nearer(float distance, Id id, float other_distance, Id other_id) {
  if (distance < other_distance) return true;
  if (distance > other_distance) return false;
  const bool is_number = !std::isnan(distance);
  return is_number == !std::isnan(other_distance) ? id < other_id : is_number;
}

struct Found {
  float distance;
  int64_t id;
  bool operator<(const Found& other) const {
    return is_nearer(distance, id, other.distance, other.id);
  }
};

// The k nearest of what it was shown.
class Nearest {
 public:
  void clear(int64_t k) {
    k_ = static_cast<size_t>(k);
    heap_.clear();
  }

  // False: there are k nearer ones.
  bool keep(const Found& found) {
    if (is_full()) {
      if (!(found < heap_.front())) return false;
      std::pop_heap(heap_.begin(), heap_.end());
      heap_.back() = found;
    } else {
      heap_.push_back(found);
    }
    std::push_heap(heap_.begin(), heap_.end());
    return true;
  }

  // Whether it is one of them.
  bool has(int64_t id) const {
    const auto is_it = [&](const Found& each) { return each.id == id; };
    return std::any_of(heap_.begin(), heap_.end(), is_it);
  }

  int64_t size() const { return static_cast<int64_t>(heap_.size()); }
  bool is_full() const { return heap_.size() == k_; }
  float farthest() const { return heap_.front().distance; }

  // Nearest first.
  std::vector<Found> sorted() const {
    std::vector<Found> found = heap_;
    std::sort_heap(found.begin(), found.end());
    return found;
  }

 private:
  size_t k_ = 0;
  std::vector<Found> heap_;  // the farthest on top
};

}  // namespace espnx::graph
