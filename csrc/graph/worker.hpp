// A thread of a searcher: its queue, and the walks that are under way on it.
#pragma once

#include <atomic>
#include <chrono>
#include <optional>

#include "io/queue/own_queue.hpp"
#include "search.hpp"

namespace espnx::graph {

inline io::Failure make_failure(io::Kind kind, std::string what) {
  io::Failure failure;
  failure.kind = kind;
  failure.what = std::move(what);
  return failure;
}

// The queries of one call.
struct GraphSearcher::Job {
  using Clock = std::chrono::steady_clock;

  const SearchRequest* request;       // the caller's, while walks are under way
  std::chrono::nanoseconds patience;  // with each query, from when its walk begins
  int64_t next = 0;                   // query that nobody has taken; under the searcher's mutex
  std::atomic<bool> failed{false};
  std::mutex mutex;  // guards what follows; taken after the searcher's
  std::condition_variable changed;
  int64_t under_way = 0;  // walks of workers
  int64_t left = 0;       // queries that have not ended
  std::optional<io::Failure> failure;
  // Of `partial`: how many times it was called, after how many pages a walk shows what it has
  // found, and for which call each query has; of one that has ended for every call.
  std::atomic<int64_t> early_call{0}, early_pages{0};
  std::vector<int64_t> shown;

  void fail(io::Failure why) {
    std::lock_guard lock(mutex);
    if (!failure) failure = std::move(why);
    failed = true;
    changed.notify_all();
  }
};

// What one thread does. Everything but `abandon` is called by that thread.
class GraphSearcher::Worker {
 public:
  // Makes the queue: in the thread that runs it, to which a single-issuer ring belongs.
  explicit Worker(GraphSearcher& searcher);

  // Until the searcher closes.
  void run();

  // The queue itself has failed: nothing more will be heard of what is under way.
  void abandon(const io::Failure& failure);

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int64_t kBeamAhead =
      4;  // reads of a walk that the queue has room for, all walks at work

  struct Read {
    int64_t slot = -1;
    Want want{};
    PagePlace at{};  // of a page of nodes
    std::shared_ptr<io::Buffer> buffer;
  };
  struct Slot {
    std::shared_ptr<Job> job;
    int64_t query = 0;
    int64_t reads = 0;  // with the queue
    int64_t pages = 0;  // of nodes, that have arrived
    int64_t shown = 0;  // see Job
    Clock::time_point begun;
    GraphWalk walk;
  };

  std::unique_ptr<io::Queue> make_queue();
  // Waits while there is nothing to do. False: the searcher closes.
  bool take_queries();
  void step();
  void begin(size_t i);
  // Reads as much as the walk wants, or ends it.
  void go_on(size_t i);
  int64_t page_bytes(const Read& read) const {
    return read.want.is_codes ? kCodePageBytes : layout_.page_bytes;
  }
  io::File& file(const Read& read) const {
    return read.want.is_codes ? *searcher_.codes_file_ : *searcher_.files_[read.at.part->file];
  }
  int64_t begin_bytes(const Read& read) const;
  void start_read(size_t i, Want want);
  void ended(Read read, io::Progress progress);
  // A page that has arrived, or the failure of its job.
  void take(Read& read);
  void look_at(size_t i, Clock::time_point now);
  static void write_found(const std::vector<Found>& found, int64_t k, int64_t* rows,
                          float* distances);
  // What the walk has found so far, where `partial` waits for it.
  void show_early(Slot& slot);
  void write_result(Slot& slot);
  void end(size_t i);
  // When the searcher closes.
  void drain();

  GraphSearcher& searcher_;
  const PageLayout& layout_;
  PageCache code_cache_;
  size_t depth_;
  io::OwnQueue<Read> queue_;
  std::vector<Slot> slots_;
  std::vector<size_t> starved_;  // slots whose walks wait for a place in the queue
  std::vector<size_t> fresh_;    // slots whose walks have not begun
  std::vector<std::shared_ptr<io::Buffer>> buffers_;  // of pages that have been looked at
  int64_t busy_ = 0;
  Clock::time_point next_look_{};
};

}  // namespace espnx::graph
