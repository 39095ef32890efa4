// Searches a graph on storage for many queries at a time: a few threads, each with a queue of its
// own and many walks under way on it, which go on page by page as reads end, and not round by
// round.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "io/buffer.hpp"
#include "io/failure.hpp"
#include "io/file.hpp"
#include "io/queue/faulty_queue.hpp"
#include "io/queue/queue.hpp"
#include "page_cache.hpp"
#include "walk.hpp"

namespace espnx::graph {

struct SearchOptions {
  std::string path = "auto";  // of the reads: auto, uring, posix, memory
  io::Direct direct = io::Direct::automatic;
  int threads = 2;
  int64_t walks = 32;                  // of a thread, under way at a time
  int64_t code_cache_bytes = 5 << 20;  // of a thread: pages of codes that were read last
  int64_t grace_ns = 1'000'000'000;    // at the end, for reads that nobody waits for any more
  std::vector<io::FaultRule> rules;
  uint64_t seed = 0;
};

struct SearchRequest {
  WalkOptions walk;
  int64_t n_queries = 0;
  const uint8_t* queries = nullptr;    // [n_queries, dim] as DistanceQuery takes them
  const float* queries_f32 = nullptr;  // the same
  int64_t query_bytes = 0;             // of one in `queries`
  const RowFilter* filter = nullptr;   // see GraphWalk::begin
  const int64_t* absent = nullptr;     // [n_queries, copies], see GraphWalk::begin; null: none
  // Parts that the walk of query q goes through, see GraphWalk::begin: those from
  // parts[parts_begin[q]] on, up to the next query's. Null: all.
  const int64_t* parts = nullptr;
  const int64_t* parts_begin = nullptr;  // [n_queries + 1]
  double deadline_s = 30;                // of each of them, from when it is begun
  // Written: [n_queries, k], rows -1 where there are fewer; and per query.
  int64_t* rows = nullptr;
  float* distances = nullptr;
  int64_t* pages = nullptr;
  int64_t* code_pages = nullptr;
  int64_t* measured = nullptr;
  int64_t* estimated = nullptr;
  float* seconds = nullptr;
  // Written by `partial`: [n_queries, k], as `rows` and `distances`.
  int64_t* early_rows = nullptr;
  float* early_distances = nullptr;
};

class GraphSearcher {
 public:
  // A search under way. It writes to what the request points to until `finish` or `cancel` has
  // returned.
  struct Job;

  // Opens the files, and starts the threads. Throws FailureError.
  GraphSearcher(GraphView view, SearchOptions options);
  ~GraphSearcher();
  GraphSearcher(const GraphSearcher&) = delete;
  GraphSearcher& operator=(const GraphSearcher&) = delete;

  // Begins a search. Any thread. The request stays the caller's, and where it is.
  std::shared_ptr<Job> start(const SearchRequest& request);

  // What follows asks `interrupted` about twenty times a second, and throws FailureError: the first
  // failure of a read, a damaged page, the deadline, close(); then no result is whole, and nothing
  // writes to the request's memory.

  // Waits until every walk has read so many pages or has ended, and writes down the nearest that
  // each has found.
  void partial(const std::shared_ptr<Job>& job, int64_t pages,
               const std::function<bool()>& interrupted);

  // Waits for the end of all walks.
  void finish(const std::shared_ptr<Job>& job, const std::function<bool()>& interrupted);

  // Whoever waits for a search, or will, gets FailureError (cancelled), unless it has ended. Any
  // thread; does not wait.
  static void call_off(const std::shared_ptr<Job>& job);

  // Ends a search that nobody waits for any more. A second call does nothing, as one after the end.
  void cancel(const std::shared_ptr<Job>& job);

  // Walks under way end with FailureError (closed). Waits for the threads.
  void close();

  const GraphView& view() const { return view_; }
  const std::string& effective() const { return effective_; }
  const std::string& fallback_reason() const { return fallback_reason_; }
  bool direct() const { return any_file().direct; }

 private:
  class Worker;
  void wait(const std::shared_ptr<Job>& job, const std::function<bool()>& is_over,
            const std::function<bool()>& interrupted);
  void break_down(const io::Failure& failure);  // a queue has failed: no search goes on

  GraphView view_;
  SearchOptions options_;
  // One of the files of pages that there are.
  const io::File& any_file() const;

  std::vector<std::shared_ptr<io::File>> files_;  // of pages; null: of a path that is empty
  std::shared_ptr<io::File> codes_file_;
  std::shared_ptr<io::BufferPool> pool_;
  std::shared_ptr<io::FaultState> faults_;
  std::string effective_, fallback_reason_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable work_, up_;
  std::deque<std::shared_ptr<Job>> jobs_;  // that have queries nobody has taken
  bool stopping_ = false;
  int started_ = 0;
  std::exception_ptr broken_;
  std::vector<std::thread> threads_;
};

}  // namespace espnx::graph
