// What a walk keeps of the nodes that it knows of: which it has met, and the nearest of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "nearest.hpp"

namespace espnx::graph {

struct Candidate {
  float distance;
  uint32_t node;
  bool operator<(const Candidate& other) const {
    return is_nearer(distance, node, other.distance, other.node);
  }
};

// A table by number of a node, or of a page, with open addressing, so that forgetting everything is
// one memset. An entry names its key as `key_and_one`, 0 where there is none.
template <typename Entry>
class NodeTable {
 public:
  void clear() {
    if (entries_.empty()) entries_.resize(kFew);
    std::fill(entries_.begin(), entries_.end(), Entry{});
    count_ = 0;
  }

  // False: the key is there, and its entry stays.
  bool add(const Entry& entry) {
    if (2 * count_ >= entries_.size()) grow();
    Entry& place = entries_[place_of(entry.key_and_one - 1)];
    if (place.key_and_one != 0) return false;
    place = entry;
    ++count_;
    return true;
  }

  // Null: it is not there.
  const Entry* find(uint32_t key) const {
    const Entry& entry = entries_[place_of(key)];
    return entry.key_and_one == 0 ? nullptr : &entry;
  }

 private:
  static constexpr size_t kFew = 1024;

  size_t place_of(uint32_t key) const {
    size_t at =
        static_cast<size_t>((key * uint64_t{0x9E3779B97F4A7C15}) >> 32) & (entries_.size() - 1);
    while (entries_[at].key_and_one != 0 && entries_[at].key_and_one != key + 1)
      at = (at + 1) & (entries_.size() - 1);
    return at;
  }

  void grow() {
    std::vector<Entry> old(std::max(kFew, 2 * entries_.size()));
    old.swap(entries_);
    count_ = 0;
    for (const Entry& each : old) {
      if (each.key_and_one != 0) add(each);
    }
  }

  std::vector<Entry> entries_;  // a power of two
  size_t count_ = 0;
};

class NodeSet {
 public:
  void clear() { table_.clear(); }
  bool add(uint32_t node) { return table_.add({node + 1}); }  // false: it is there
  bool has(uint32_t node) const { return table_.find(node) != nullptr; }

 private:
  struct Entry {
    uint32_t key_and_one = 0;
  };
  NodeTable<Entry> table_;
};

// Of nodes that were candidates: with which distance.
class NodeDistances {
 public:
  void clear() { table_.clear(); }
  void add(const Candidate& candidate) { table_.add({candidate.node + 1, candidate.distance}); }
  // Null: it never was one.
  const float* find(uint32_t node) const {
    const Entry* entry = table_.find(node);
    return entry == nullptr ? nullptr : &entry->distance;
  }

 private:
  struct Entry {
    uint32_t key_and_one = 0;
    float distance = 0;
  };
  NodeTable<Entry> table_;
};

// The nearest candidates, up to a number of them, L; some of them wait for their page. Both are
// heaps, so that adding one and taking the nearest cost the logarithm of L. Whether one is among
// the L nearest says a comparison with the farthest of them: nothing is ever searched for, or
// moved.
class CandidateList {
 public:
  void clear(int64_t most) {
    most_ = static_cast<size_t>(most);
    kept_.clear();
    waiting_.clear();
  }

  // False: it is too far.
  bool add(const Candidate& candidate, bool waits) {
    if (is_full()) {
      if (!(candidate < kept_.front())) return false;
      std::pop_heap(kept_.begin(), kept_.end());
      kept_.back() = candidate;
    } else {
      kept_.push_back(candidate);
    }
    std::push_heap(kept_.begin(), kept_.end());
    if (!waits) return true;
    if (waiting_.size() >= 2 * most_ + kFew) forget_dropped();
    waiting_.push_back(candidate);
    std::push_heap(waiting_.begin(), waiting_.end(), is_farther);
    return true;
  }

  // Of one that was added: whether nearer ones have not driven it out.
  bool holds(const Candidate& candidate) const {
    return !is_full() || !(kept_.front() < candidate);
  }

  int64_t size() const { return static_cast<int64_t>(kept_.size()); }
  bool is_full() const { return kept_.size() == most_; }

  // The nearest that waits, or null. `is_over`: of one whose page has been asked for, which waits
  // no more.
  template <typename Over>
  const Candidate* nearest_waiting(const Over& is_over) {
    while (!waiting_.empty()) {
      const Candidate& nearest = waiting_.front();
      if (!holds(nearest)) {
        waiting_.clear();  // and all others are farther
      } else if (is_over(nearest.node)) {
        drop_nearest();
      } else {
        return &nearest;
      }
    }
    return nullptr;
  }

  void drop_nearest() {
    std::pop_heap(waiting_.begin(), waiting_.end(), is_farther);
    waiting_.pop_back();
  }

 private:
  static constexpr size_t kFew = 64;
  static bool is_farther(const Candidate& a, const Candidate& b) { return b < a; }

  void forget_dropped() {
    const auto is_dropped = [this](const Candidate& each) { return !holds(each); };
    waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), is_dropped), waiting_.end());
    std::make_heap(waiting_.begin(), waiting_.end(), is_farther);
  }

  size_t most_ = 0;
  std::vector<Candidate> kept_;     // the farthest on top
  std::vector<Candidate> waiting_;  // the nearest on top; with some that have been driven out
};

}  // namespace espnx::graph
