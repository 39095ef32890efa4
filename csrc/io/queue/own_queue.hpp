// A queue that one thread has for itself, and the reads that are under way on it: each with its
// memory and with what its reader wants to know again when it ends. Short reads go on by
// themselves.
#pragma once

#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "io/piece.hpp"

namespace espnx::io {

// `Read` is movable, and holds the memory that is read into.
template <typename Read>
class OwnQueue {
 public:
  // `grace_ns`: how long the end waits for what is under way.
  OwnQueue(std::unique_ptr<Queue> queue, int64_t grace_ns)
      : queue_(std::move(queue)), grace_ns_(grace_ns) {}
  ~OwnQueue() { release(); }
  OwnQueue(const OwnQueue&) = delete;
  OwnQueue& operator=(const OwnQueue&) = delete;

  size_t in_flight() const { return in_flight_; }
  // Whether the queue has requests that the kernel perhaps has not: those since the last wait.
  bool has_unsent() const { return has_unsent_; }
  // Without what was given up.
  size_t awaited() const { return in_flight_ - given_up_; }

  void submit(Read read, const Piece& piece) {
    size_t tag = entries_.size();
    if (free_.empty()) {
      entries_.emplace_back();
    } else {
      tag = free_.back();
      free_.pop_back();
    }
    entries_[tag] = {std::move(read), piece, State::awaited};
    send(tag);
  }

  // Looks at what has ended, once there is so much of it or the time is over, and tells
  // `ended(Read&&, Progress&&, moved bytes)` of each read that is done or has failed; that may
  // submit others. Returns how many requests had ended. What `ended` throws leaves the rest of them
  // untold.
  template <typename Ended>
  size_t wait(size_t at_least, int64_t timeout_ns, Ended&& ended) {
    completions_.clear();
    has_unsent_ = false;
    queue_->wait(completions_, at_least, timeout_ns);
    in_flight_ -= completions_.size();
    for (const Completion& completion : completions_) {
      const auto tag = static_cast<size_t>(completion.tag);
      Entry& entry = entries_[tag];
      if (entry.state == State::given_up) {
        --given_up_;
        free(tag);
        continue;
      }
      entry.moved_bytes += std::max<int64_t>(0, completion.result);
      Progress progress = advance(entry.piece, completion.result);
      if (progress.step == Step::again) {
        send(tag);
        continue;
      }
      Read read = std::move(entry.read);
      const int64_t moved_bytes = entry.moved_bytes;
      free(tag);
      ended(std::move(read), std::move(progress), moved_bytes);
    }
    return completions_.size();
  }

  // Nobody waits for these any more. They keep their memory until they end, if they do.
  template <typename Which>
  void give_up(Which&& which) {
    for (size_t tag = 0; tag < entries_.size(); ++tag) {
      if (entries_[tag].state != State::awaited || !which(entries_[tag].read)) continue;
      queue_->cancel(tag);
      entries_[tag].state = State::given_up;
      ++given_up_;
    }
  }

  // Ends what is under way and gives the queue away. Null where it is broken, or where a read does
  // not end: memory that a device may still write to is never freed, on purpose.
  std::unique_ptr<Queue> release() {
    if (!queue_) return nullptr;
    try {
      for (size_t tag = 0; tag < entries_.size() && in_flight_ > 0; ++tag) {
        if (entries_[tag].state == State::awaited) queue_->cancel(tag);
      }
      const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(grace_ns_);
      while (in_flight_ > 0 && std::chrono::steady_clock::now() < until) {
        completions_.clear();
        queue_->wait(completions_, 1, grace_ns_);
        in_flight_ -= completions_.size();
      }
      if (in_flight_ == 0) return std::move(queue_);
    } catch (const FailureError&) {
      // Broken: what is under way is not heard of again.
    }
    leave_behind();
    return nullptr;
  }

  // Of a queue that is broken.
  void leave_behind() {
    static std::mutex mutex;
    static auto* left = new std::vector<std::pair<std::deque<Entry>, std::unique_ptr<Queue>>>();
    std::lock_guard lock(mutex);
    left->emplace_back(std::move(entries_), std::move(queue_));
  }

 private:
  enum class State : uint8_t { free, awaited, given_up };
  struct Entry {
    Read read{};
    Piece piece{};
    State state = State::free;
    int64_t moved_bytes = 0;
  };

  void send(size_t tag) {
    ++in_flight_;
    has_unsent_ = true;
    queue_->submit(entries_[tag].piece.request(tag));
  }
  void free(size_t tag) {
    entries_[tag] = {};
    free_.push_back(tag);
  }

  std::unique_ptr<Queue> queue_;
  int64_t grace_ns_;
  std::deque<Entry> entries_;  // by tag
  std::vector<size_t> free_;
  std::vector<Completion> completions_;
  size_t in_flight_ = 0, given_up_ = 0;
  bool has_unsent_ = false;
};

}  // namespace espnx::io
