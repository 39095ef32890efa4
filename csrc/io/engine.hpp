// The storage engine: one I/O thread, one queue, one completion routine, whatever the queue is.
//
//   caller threads -- submit(Transfer) --> active list
//     --> I/O thread: fills the queue, reaps it, retries, fails
//     --> Transfer --> caller
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "buffer.hpp"
#include "io/queue/faulty_queue.hpp"
#include "io/queue/queue.hpp"
#include "transfer.hpp"

namespace espnx::io {

struct EngineOptions {
  std::string path = "auto";  // auto, uring, posix, memory
  unsigned queue_depth = 128;
  unsigned threads = 32;  // posix only
  int64_t request_bytes =
      960 << 10;  // more memory segments than many drives take in one request begin at 1 MiB
  int64_t pool_bytes = 256 << 20;
  bool poison = false;
  std::vector<FaultRule> rules;
  uint64_t seed = 0;
};

struct EngineStats {
  int64_t bytes_asked = 0, bytes_moved = 0, requests = 0, retries = 0, failures = 0;
  int64_t in_flight = 0, quarantined_buffers = 0, quarantined_bytes = 0, fault_hits = 0;
};

// The first of 2^32 numbers for the files of one engine. They differ between engines, of every
// kind, so that a plan for one cannot read files of another.
int64_t reserve_file_numbers();

class Engine {
 public:
  // Throws FailureError: unavailable where the named path cannot be had.
  explicit Engine(EngineOptions options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const std::string& effective() const { return effective_; }
  const std::string& fallback_reason() const { return fallback_reason_; }

  int64_t open(const std::string& path, Mode mode, Direct direct);
  void close_file(int64_t file);
  std::shared_ptr<File> file(int64_t file);
  bool allocate(int64_t file, int64_t size_bytes);
  void truncate(int64_t file, int64_t size_bytes);
  void sync(int64_t file);
  void sync_directory(const std::string& path);
  // Lets an injected fault hit an operation that the caller is about to do itself (rename, unlink).
  // Throws FailureError.
  void before(const char* operation, const std::string& path);

  std::shared_ptr<Transfer> submit(TransferSpec spec);
  EngineStats stats();

  // Memory for what is read and written, from the pool that reads without a place of their own use.
  // Throws bad_alloc.
  std::shared_ptr<Buffer> memory(int64_t size_bytes) { return pool_->take(size_bytes); }
  const std::shared_ptr<BufferPool>& pool() const { return pool_; }
  int64_t mapped_bytes() { return pool_->mapped_bytes(); }

  // A queue of the engine's kind, with its faults, for the thread that calls: what that thread
  // reads itself, nobody has to be woken for. Throws FailureError.
  std::unique_ptr<Queue> thread_queue(unsigned depth);
  // No other engine of this process has it, ever.
  int64_t id() const { return first_file_; }

  // False in a child after fork(): it has the memory of the engine, but neither its thread nor the
  // state of its locks.
  bool in_own_process() const;

  // Fails what is outstanding, waits up to `grace_s` for the device to let go of its buffers, and
  // abandons (never frees) the rest. Of several callers one closes and the others wait for it.
  void close(double grace_s);

 private:
  struct Slot {
    std::shared_ptr<Transfer> transfer;
    size_t extent = 0;
    Piece piece;
    bool cancel_sent = false;
  };

  std::unique_ptr<Queue> make_queue();
  void check_process(const std::string& what) const;
  void check_open(const std::string& what) const;
  size_t index_of(int64_t file)
      const;  // of files_; throws FailureError for the number of another engine's file
  void forget();
  void run();
  void notify_touched();
  void admit();  // takes from the active list into the queue
  void send_cancels();
  void complete(const Completion& completion);
  void end(uint64_t tag, bool whole);
  void fail_everything(const Failure& failure);
  void drain();
  void abandon_what_is_left();

  EngineOptions options_;
  std::string effective_, fallback_reason_;
  std::shared_ptr<BufferPool> pool_;
  std::shared_ptr<FaultState> faults_;
  int process_ = 0;
  int64_t first_file_ = 0;

  std::mutex mutex_;  // guards files_, active_, queue_ (its lifetime), up_, closing_, closed_,
                      // grace_s_; stopping_ is set under it
  std::condition_variable state_changed_;
  Files files_;
  std::list<std::shared_ptr<Transfer>> active_;
  std::unique_ptr<Queue> queue_;
  bool up_ = false, closing_ = false, closed_ = false;
  std::atomic<bool> stopping_{false}, cancel_wanted_{false};
  double grace_s_ = 0;

  std::vector<Slot> slots_;  // I/O thread only, like the two below
  std::vector<uint64_t> free_slots_;
  std::vector<std::shared_ptr<Transfer>> touched_;
  std::atomic<int64_t> bytes_asked_{0}, bytes_moved_{0}, requests_{0}, retries_{0}, failures_{0},
      in_flight_{0};
  int64_t abandoned_buffers_ = 0, abandoned_bytes_ = 0;
  std::thread thread_;
};

}  // namespace espnx::io
