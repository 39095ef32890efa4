// The queues that need nothing special: a pool of threads that call pread and pwrite, and the same
// calls made in place (memory files).
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "io/failure.hpp"
#include "queue.hpp"

namespace espnx::io {
namespace {

int64_t transfer_once(const Request& request) {
  ssize_t result;
  do {
    result = request.op == Op::read
                 ? pread(request.file->fd, request.data, request.size, request.offset)
                 : pwrite(request.file->fd, request.data, request.size, request.offset);
  } while (result < 0 && errno == EINTR);
  return result < 0 ? -errno : result;
}

// What the threads share. They hold it alive themselves, because a thread stuck in a dead device's
// pread cannot be joined.
struct PoolState {
  std::mutex mutex;
  std::condition_variable work, done;
  std::deque<Request> requests;
  std::vector<Completion> completions;
  size_t wanted = 1;  // completions the waiting thread sleeps for
  bool woken = false;
  bool stopping = false;

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      work.wait(lock, [this] { return stopping || !requests.empty(); });
      if (requests.empty()) return;
      const Request request = requests.front();
      requests.pop_front();
      lock.unlock();
      const int64_t result = transfer_once(request);
      lock.lock();
      completions.push_back({request.tag, result});
      if (completions.size() >= wanted) done.notify_one();
    }
  }
};

class PosixQueue final : public Queue {
 public:
  explicit PosixQueue(unsigned threads) : limit_(threads) {}

  ~PosixQueue() override {
    {
      std::lock_guard lock(state_->mutex);
      state_->stopping = true;
      state_->requests.clear();
    }
    state_->work.notify_all();
  }

  void submit(const Request& request) override {
    size_t backlog;
    {
      std::lock_guard lock(state_->mutex);
      state_->requests.push_back(request);
      backlog = state_->requests.size();
    }
    // Threads are started as the work needs them, so that a single read costs one thread and one
    // pread.
    if (started_ < limit_ && backlog > idle_guess()) start_thread();
    ++outstanding_;
    state_->work.notify_one();
  }

  void wait(std::vector<Completion>& out, size_t at_least, int64_t timeout_ns) override {
    std::unique_lock lock(state_->mutex);
    state_->wanted = at_least > out.size() ? at_least - out.size() : 0;
    const auto ready = [&] {
      return state_->woken || out.size() + state_->completions.size() >= at_least;
    };
    if (timeout_ns < 0) {
      state_->done.wait(lock, ready);
    } else {
      state_->done.wait_for(lock, std::chrono::nanoseconds(timeout_ns), ready);
    }
    state_->woken = false;
    outstanding_ -= state_->completions.size();
    out.insert(out.end(), state_->completions.begin(), state_->completions.end());
    state_->completions.clear();
  }

  void wake() override {
    std::lock_guard lock(state_->mutex);
    state_->woken = true;
    state_->done.notify_one();
  }

  void cancel(uint64_t tag) override {
    std::lock_guard lock(state_->mutex);
    for (auto it = state_->requests.begin(); it != state_->requests.end(); ++it) {
      if (it->tag != tag) continue;
      state_->requests.erase(it);
      state_->completions.push_back({tag, -ECANCELED});
      return;
    }
  }

 private:
  void start_thread() {
    try {
      std::thread([state = state_] { state->run(); }).detach();
      ++started_;
    } catch (const std::system_error& error) {
      // No memory for a stack, or too many threads. Those that run do the work more slowly; without
      // any nothing would ever complete.
      if (started_ > 0) return;
      Failure failure;
      failure.kind = Kind::read;
      failure.error = error.code().value();
      failure.what = "cannot start an I/O thread";
      throw FailureError(failure);
    }
  }

  size_t idle_guess() const { return started_ > outstanding_ ? started_ - outstanding_ : 0; }

  std::shared_ptr<PoolState> state_ = std::make_shared<PoolState>();
  size_t limit_;
  size_t started_ = 0;
  size_t outstanding_ = 0;
};

class InlineQueue final : public Queue {
 public:
  void submit(const Request& request) override {
    completions_.push_back({request.tag, transfer_once(request)});
  }

  void wait(std::vector<Completion>& out, size_t at_least, int64_t timeout_ns) override {
    out.insert(out.end(), completions_.begin(), completions_.end());
    completions_.clear();
    if (out.size() >= at_least) return;
    std::unique_lock lock(mutex_);
    if (timeout_ns < 0) {
      waker_.wait(lock, [this] { return woken_; });
    } else {
      waker_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [this] { return woken_; });
    }
    woken_ = false;
  }

  void wake() override {
    std::lock_guard lock(mutex_);
    woken_ = true;
    waker_.notify_one();
  }

  void cancel(uint64_t) override {}  // everything has completed by the time anyone could ask

 private:
  std::vector<Completion> completions_;
  std::mutex mutex_;
  std::condition_variable waker_;
  bool woken_ = false;
};

}  // namespace

std::unique_ptr<Queue> make_posix_queue(unsigned threads) {
  return std::make_unique<PosixQueue>(threads);
}
std::unique_ptr<Queue> make_inline_queue() { return std::make_unique<InlineQueue>(); }

}  // namespace espnx::io
