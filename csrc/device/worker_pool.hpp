// Threads that work for whoever asks something of a stream: started when they are needed, at most
// so many, each taking jobs from one line. Where no thread is to be had, the line is not worked on,
// and whoever asks does the work. Whoever has a pool ends it, by stop(), before what its work uses
// is gone. (In a child after fork() it is left where it is: its threads are the parent's.)
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace espnx::device {

template <typename Job>
class WorkerPool {
 public:
  WorkerPool(int max_workers, std::function<void(Job)> work)
      : max_workers_(static_cast<size_t>(max_workers)), work_(std::move(work)) {}
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  size_t max_workers() const { return max_workers_; }

  // Puts a job in line, and sees to it that a thread takes it.
  void add(Job job) {
    std::lock_guard lock(mutex_);
    line_.push_back(std::move(job));
    if (idle_ >= line_.size()) {
      wake_.notify_one();
    } else if (workers_.size() < max_workers_) {
      try {
        workers_.emplace_back([this] { run(); });
      } catch (const std::system_error&) {
      }
    }
  }

  // Nothing in line is wanted any more.
  void clear() {
    std::lock_guard lock(mutex_);
    line_.clear();
  }

  // Waits for jobs under way; what is in line stays undone.
  void stop() {
    {
      std::lock_guard lock(mutex_);
      is_stopping_ = true;
      wake_.notify_all();
    }
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      wake_.wait(lock, [&] { return is_stopping_ || !line_.empty(); });
      --idle_;
      if (is_stopping_) return;
      {
        Job job = std::move(line_.front());
        line_.pop_front();
        lock.unlock();
        work_(std::move(job));
      }
      lock.lock();
    }
  }

  const size_t max_workers_;
  const std::function<void(Job)> work_;
  std::mutex mutex_;  // taken after all others, never before
  std::condition_variable wake_;
  std::deque<Job> line_;
  std::vector<std::thread> workers_;
  size_t idle_ = 0;
  bool is_stopping_ = false;
};

}  // namespace espnx::device
