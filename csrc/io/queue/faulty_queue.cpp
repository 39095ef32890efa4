#include "faulty_queue.hpp"

#include <fnmatch.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <unordered_map>

namespace espnx::io {

const FaultRule* FaultState::hit(const char* operation, const std::string& path,
                                 int64_t offset_bytes, int64_t size_bytes) {
  std::lock_guard lock(mutex_);
  const FaultRule* found = nullptr;
  for (size_t i = 0; i < rules_.size(); ++i) {
    const FaultRule& rule = rules_[i];
    if (fnmatch(rule.operation.c_str(), operation, 0) != 0 ||
        fnmatch(rule.path.c_str(), path.c_str(), 0) != 0)
      continue;
    if (offset_bytes >= rule.end_bytes ||
        offset_bytes + std::max<int64_t>(size_bytes, 1) <= rule.begin_bytes)
      continue;
    const int64_t match = ++matches_[i];
    if (found != nullptr || match < rule.nth) continue;
    if (rule.count >= 0 && match >= rule.nth + rule.count) continue;
    if (rule.probability < 1 && std::uniform_real_distribution<>(0, 1)(random_) >= rule.probability)
      continue;
    found = &rule;
  }
  if (found != nullptr) ++hits_;
  return found;
}

int64_t FaultState::hits() {
  std::lock_guard lock(mutex_);
  return hits_;
}

namespace {

using Clock = std::chrono::steady_clock;

struct FreeDeleter {
  void operator()(char* memory) const { std::free(memory); }
};

// What has to happen to a request on its way back.
struct Pending {
  Request request;  // as the engine made it
  Fault fault;
  int64_t value;
  std::unique_ptr<char, FreeDeleter>
      copy;  // a write's flipped bytes; the caller's memory is not touched
};

class FaultyQueue final : public Queue {
 public:
  FaultyQueue(std::unique_ptr<Queue> inner, std::shared_ptr<FaultState> state)
      : inner_(std::move(inner)), state_(std::move(state)) {}

  void submit(const Request& request) override {
    const FaultRule* rule = state_->hit(request.op == Op::read ? "read" : "write",
                                        request.file->path, request.offset, request.size);
    if (rule == nullptr) return inner_->submit(request);
    switch (rule->fault) {
      case Fault::error: return done_.push_back({request.tag, -rule->value});
      case Fault::stale: return done_.push_back({request.tag, expected(request)});
      case Fault::never: return;
      case Fault::delay:
        if (request.op == Op::read) break;
        // Its bytes are late, too: whoever has given it up finds them where they do not belong.
        held_.push_back({Clock::now() + std::chrono::nanoseconds(rule->value), request});
        return;
      case Fault::flip: break;
      case Fault::short_: break;
    }
    Pending pending{request, rule->fault, rule->value, nullptr};
    Request changed = request;
    if (rule->fault == Fault::short_ && request.op == Op::write) {
      // A direct write cannot stop inside a block: what lands is whole blocks.
      changed.size = std::min(request.size, rule->value / request.file->alignment_bytes *
                                                request.file->alignment_bytes);
      if (changed.size == 0) return done_.push_back({request.tag, 0});
    }
    if (rule->fault == Fault::flip && request.op == Op::write) {
      pending.copy.reset(static_cast<char*>(std::aligned_alloc(
          kBlockBytes, (request.size + kBlockBytes - 1) / kBlockBytes * kBlockBytes)));
      if (!pending.copy) throw std::bad_alloc();
      std::memcpy(pending.copy.get(), request.data, request.size);
      flip(pending.copy.get(), request.size, rule->value);
      changed.data = pending.copy.get();
    }
    inner_->submit(changed);
    pending_.emplace(request.tag, std::move(pending));
  }

  void wait(std::vector<Completion>& out, size_t at_least, int64_t timeout_ns) override {
    submit_held();
    release_late(out);
    out.insert(out.end(), done_.begin(), done_.end());
    done_.clear();
    std::vector<Completion> found;
    const size_t missing = at_least > out.size() ? at_least - out.size() : 0;
    int64_t limit_ns = missing == 0 ? 0 : timeout_ns;
    if (!late_.empty() || !held_.empty()) {
      const int64_t until_ns = std::max<int64_t>(0, (next_late() - Clock::now()).count());
      limit_ns = limit_ns < 0 ? until_ns : std::min(limit_ns, until_ns);
    }
    inner_->wait(found, missing, limit_ns);
    for (const Completion& completion : found) come_back(completion, out);
    submit_held();
    release_late(out);
  }

  void wake() override { inner_->wake(); }
  void cancel(uint64_t tag) override { inner_->cancel(tag); }

 private:
  static void flip(char* data, int64_t size, int64_t bit) {
    if (size > 0) data[(bit / 8) % size] ^= static_cast<char>(1 << (bit % 8));
  }

  // The device has written everything; what it is said not to have moved must not be there.
  static void cut(const Pending& pending, int64_t& result) {
    const int64_t kept = std::clamp<int64_t>(pending.value, 0, result);
    if (pending.request.op == Op::read)
      std::memset(pending.request.data + kept, 0xA5, result - kept);
    result = kept;
  }

  static int64_t expected(const Request& request) {
    if (request.op == Op::write) return request.size;
    return std::clamp<int64_t>(request.file->size_bytes - request.offset, 0, request.size);
  }

  // When something is due; there is something.
  Clock::time_point next_late() const {
    Clock::time_point found = Clock::time_point::max();
    for (const Late& each : late_) found = std::min(found, each.at);
    for (const Held& each : held_) found = std::min(found, each.at);
    return found;
  }

  void submit_held() {
    const Clock::time_point now = Clock::now();
    for (size_t i = 0; i < held_.size();) {
      if (held_[i].at > now) {
        ++i;
        continue;
      }
      inner_->submit(held_[i].request);
      held_[i] = held_.back();
      held_.pop_back();
    }
  }

  void come_back(Completion completion, std::vector<Completion>& out) {
    const auto found = pending_.find(completion.tag);
    if (found == pending_.end()) return out.push_back(completion);
    const Pending& pending = found->second;
    if (completion.result > 0) {
      if (pending.fault == Fault::short_) cut(pending, completion.result);
      if (pending.fault == Fault::flip && !pending.copy)
        flip(pending.request.data, completion.result, pending.value);
    }
    if (pending.fault == Fault::delay) {
      late_.push_back({Clock::now() + std::chrono::nanoseconds(pending.value), completion});
    } else {
      out.push_back(completion);
    }
    pending_.erase(found);
  }

  void release_late(std::vector<Completion>& out) {
    const Clock::time_point now = Clock::now();
    for (size_t i = 0; i < late_.size();) {
      if (late_[i].at > now) {
        ++i;
        continue;
      }
      out.push_back(late_[i].completion);
      late_[i] = late_.back();
      late_.pop_back();
    }
  }

  struct Late {
    Clock::time_point at;
    Completion completion;
  };

  struct Held {
    Clock::time_point at;
    Request request;
  };

  std::unique_ptr<Queue> inner_;
  std::shared_ptr<FaultState> state_;
  std::unordered_map<uint64_t, Pending> pending_;
  std::vector<Completion> done_;
  std::vector<Late> late_;
  std::vector<Held> held_;  // writes that have not begun
};

}  // namespace

std::unique_ptr<Queue> make_faulty_queue(std::unique_ptr<Queue> inner,
                                         std::shared_ptr<FaultState> state) {
  return std::make_unique<FaultyQueue>(std::move(inner), std::move(state));
}

}  // namespace espnx::io
