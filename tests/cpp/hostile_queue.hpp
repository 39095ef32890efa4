// A queue as bad as the contract allows: completes in any order, late, in parts, with EAGAIN, and
// leaves filler where it has moved nothing.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <random>
#include <unordered_map>
#include <vector>

#include "io/queue/queue.hpp"

namespace espnx::io {

class HostileQueue final : public Queue {
 public:
  HostileQueue(std::unique_ptr<Queue> inner, uint64_t seed)
      : inner_(std::move(inner)), random_(seed) {}

  void submit(const Request& request) override {
    Request changed = request;
    const int64_t unit = request.file->alignment_bytes;
    if (request.op == Op::write && chance(4)) changed.size = below(request.size / unit) * unit;
    if (changed.size == 0 || chance(20)) {
      held_.push_back({request.tag, chance(2) ? -EAGAIN : -EINTR});
      return;
    }
    requests_[request.tag] = request;
    inner_->submit(changed);
  }

  void wait(std::vector<Completion>& out, size_t at_least, int64_t timeout_ns) override {
    std::vector<Completion> found;
    const bool enough = out.size() + held_.size() >= at_least;
    inner_->wait(found, held_.empty() ? at_least - out.size() : 0,
                 enough || !held_.empty() ? 0 : timeout_ns);
    for (Completion completion : found) {
      const auto at = requests_.find(completion.tag);
      if (at != requests_.end()) cut(at->second, completion);
      if (at != requests_.end()) requests_.erase(at);
      held_.push_back(completion);
    }
    std::shuffle(held_.begin(), held_.end(), random_);
    const size_t kept = held_.size() > 1 ? below(static_cast<int64_t>(held_.size())) : 0;
    out.insert(out.end(), held_.begin() + static_cast<int64_t>(kept), held_.end());
    held_.resize(kept);
  }

  void wake() override { inner_->wake(); }
  void cancel(uint64_t tag) override { inner_->cancel(tag); }

 private:
  // A short read: of any length, also inside a block, and what was not moved is not there.
  void cut(const Request& request, Completion& completion) {
    if (request.op != Op::read || completion.result <= 0 || !chance(3)) return;
    int64_t moved = chance(4) ? below(completion.result) : completion.result;
    if (chance(2))
      moved = std::min(moved, below(4) * kBlockBytes + (chance(2) ? below(kBlockBytes) : 0));
    std::memset(request.data + moved, 0xEE, completion.result - moved);
    completion.result = moved;
  }

  bool chance(int64_t one_in) { return below(one_in) == 0; }
  int64_t below(int64_t limit) {
    return limit > 0 ? static_cast<int64_t>(random_() % static_cast<uint64_t>(limit)) : 0;
  }

  std::unique_ptr<Queue> inner_;
  std::mt19937_64 random_;
  std::unordered_map<uint64_t, Request> requests_;
  std::vector<Completion> held_;
};

}  // namespace espnx::io
