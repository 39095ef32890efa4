// See search.hpp.
#include "search.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <limits>

namespace espnx::graph {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kSignalCheckNs = 50'000'000;
constexpr int64_t kLongestWaitNs = 200'000'000;
constexpr int kIdleRetries = 16;  // completions without progress before a read is given up
constexpr double kGraceS = 5;     // for reads that nobody waits for any more

io::Failure make_failure(io::Kind kind, std::string what) {
  io::Failure failure;
  failure.kind = kind;
  failure.what = std::move(what);
  return failure;
}

}  // namespace

// The queries of one call.
struct GraphSearcher::Job {
  const SearchRequest* request;  // the caller's, while walks are under way
  Clock::time_point deadline;
  int64_t next = 0;  // query that nobody has taken; under the searcher's mutex
  std::atomic<bool> failed{false};
  std::mutex mutex;  // guards what follows; taken after the searcher's
  std::condition_variable changed;
  int64_t under_way = 0;  // walks of workers
  int64_t left = 0;       // queries that have not ended
  std::optional<io::Failure> failure;
  // Of `partial`: how many times it was called, after how many pages a walk shows what it has found, and for which call
  // each query has; of one that has ended for every call.
  std::atomic<int64_t> early_call{0}, early_pages{0};
  std::vector<int64_t> shown;

  void fail(io::Failure why) {
    std::lock_guard lock(mutex);
    if (!failure) failure = std::move(why);
    failed = true;
    changed.notify_all();
  }
};

// A thread's queue and walks.
class GraphSearcher::Worker {
 public:
  explicit Worker(GraphSearcher& searcher)
      : searcher_(searcher),
        layout_(searcher.view_.layout),
        code_cache_(searcher.options_.code_cache_bytes / kCodePageBytes),
        slots_(searcher.options_.walks) {
    auto& options = searcher_.options_;
    const auto depth = static_cast<unsigned>(std::min<int64_t>(4096, options.walks * kBeamAhead));
    std::string effective, reason;
    queue_ = io::make_queue(options.path, depth, 32, effective, reason);
    if (!options.rules.empty()) queue_ = io::make_faulty_queue(std::move(queue_), searcher_.faults_);
    depth_ = depth;
    std::lock_guard lock(searcher_.mutex_);
    searcher_.effective_ = effective;
    searcher_.fallback_reason_ = reason;
  }

  void run() {
    while (take_queries()) {
      step();
    }
    drain();
  }

  // The queue itself has failed: nothing more will be heard of what is under way.
  void abandon(const io::Failure& failure) {
    for (Slot& slot : slots_) {
      if (!slot.job) continue;
      slot.job->fail(failure);
      release(slot);
    }
    leave_behind();
  }

 private:
  static constexpr int64_t kBeamAhead = 4;  // reads of a walk that the queue has room for, all walks at work

  struct Read {
    int64_t slot = -1, page = 0, moved_bytes = 0;
    bool is_codes = false;
    int idle_retries = 0;
    std::shared_ptr<io::Buffer> buffer;
  };
  struct Slot {
    std::shared_ptr<Job> job;
    int64_t query = 0;
    int64_t reads = 0;  // with the queue
    int64_t shown = 0;  // see Job
    bool released = false;
    Clock::time_point begun;
    GraphWalk walk;
  };

  // Waits while there is nothing to do. False: the searcher closes.
  bool take_queries() {
    std::unique_lock lock(searcher_.mutex_);
    searcher_.work_.wait(lock, [&] { return searcher_.stopping_ || busy_ > 0 || !searcher_.jobs_.empty(); });
    if (searcher_.stopping_) return false;
    // A share of what is there, so that a small batch goes to all threads.
    int64_t share = 1;
    for (const auto& job : searcher_.jobs_) share += (job->request->n_queries - job->next) / searcher_.options_.threads;
    for (size_t i = 0; i < slots_.size() && !searcher_.jobs_.empty() && share > 0; ++i) {
      if (slots_[i].job) continue;
      auto job = searcher_.jobs_.front();
      slots_[i].query = job->next++;
      if (job->next == job->request->n_queries) searcher_.jobs_.pop_front();
      {
        std::lock_guard job_lock(job->mutex);
        ++job->under_way;
      }
      slots_[i].job = std::move(job);
      fresh_.push_back(i);
      ++busy_, --share;
    }
    return true;
  }

  void step() {
    for (const size_t i : fresh_) begin(i);
    fresh_.clear();
    if (in_flight_ == 0) return;
    completions_.clear();
    queue_->wait(completions_, 1, kLongestWaitNs);
    for (const io::Completion& completion : completions_) complete(completion);
    std::vector<size_t> starved;
    starved.swap(starved_);
    for (const size_t i : starved) go_on(i);
    const auto now = Clock::now();
    if (now < next_look_) return;
    next_look_ = now + std::chrono::milliseconds(50);
    for (size_t i = 0; i < slots_.size(); ++i) look_at(i, now);
  }

  void begin(size_t i) {
    Slot& slot = slots_[i];
    const SearchRequest& request = *slot.job->request;
    slot.begun = Clock::now();
    slot.shown = 0;
    if (slot.job->failed) return end(i);
    slot.walk.begin(searcher_.view_, request.walk, request.queries + slot.query * request.query_bytes,
                    request.queries_f32 + slot.query * layout_.dim, request.allowed);
    go_on(i);
  }

  // Reads as much as the walk wants, or ends it.
  void go_on(size_t i) {
    Slot& slot = slots_[i];
    if (slot.job->failed) {
      if (slot.reads == 0) end(i);
      return;
    }
    while (in_flight_ < depth_) {
      const auto want = slot.walk.next_page();
      if (!want) break;
      const uint8_t* codes = want->is_codes ? code_cache_.find(want->page) : nullptr;
      if (codes != nullptr) {
        slot.walk.codes_arrived(want->page, codes, false);
      } else {
        start_read(i, *want);
      }
    }
    show_early(slot);
    if (slot.reads > 0) return;
    if (!slot.walk.done()) return starved_.push_back(i);  // other walks fill the queue
    write_result(slot);
    end(i);
  }

  int64_t page_bytes(const Read& read) const { return read.is_codes ? kCodePageBytes : layout_.page_bytes; }
  const io::File& file(const Read& read) const { return read.is_codes ? *searcher_.codes_file_ : *searcher_.file_; }
  int64_t begin_bytes(const Read& read) const {
    const PageFiles& files = searcher_.files_;
    return (read.is_codes ? files.codes_begin : files.pages_begin) + read.page * page_bytes(read);
  }

  void start_read(size_t i, Want want) {
    size_t tag = 0;
    if (free_reads_.empty()) {
      tag = reads_.size();
      reads_.emplace_back();
    } else {
      tag = free_reads_.back();
      free_reads_.pop_back();
    }
    Read& read = reads_[tag];
    read.slot = static_cast<int64_t>(i);
    read.page = want.page;
    read.is_codes = want.is_codes;
    if (!read.buffer || read.buffer->capacity_bytes < page_bytes(read))
      read.buffer = searcher_.pool_->take(page_bytes(read));
    read.moved_bytes = 0;
    read.idle_retries = 0;
    ++in_flight_;
    ++slots_[i].reads;
    submit(tag);
  }

  void submit(size_t tag) {
    Read& read = reads_[tag];
    const int64_t size = page_bytes(read);
    queue_->submit({io::Op::read, &file(read), begin_bytes(read) + read.moved_bytes,
                    read.buffer->data + read.moved_bytes, size - read.moved_bytes, tag});
  }

  void complete(const io::Completion& completion) {
    const auto tag = static_cast<size_t>(completion.tag);
    Read& read = reads_[tag];
    const bool passes = completion.result == -EINTR || completion.result == -EAGAIN;
    if (completion.result > 0) read.moved_bytes += completion.result, read.idle_retries = 0;
    const bool whole = read.moved_bytes >= page_bytes(read);
    const auto slot = static_cast<size_t>(read.slot);
    const bool wanted = !slots_[slot].job->failed;
    if (!whole && wanted && (completion.result > 0 || (passes && ++read.idle_retries < kIdleRetries))) {
      return submit(tag);
    }
    --in_flight_;
    --slots_[slot].reads;
    if (wanted) take(tag, completion.result);
    read.slot = -1;
    free_reads_.push_back(tag);
    go_on(slot);
  }

  void take(size_t tag, int64_t result) {
    Read& read = reads_[tag];
    Slot& slot = slots_[read.slot];
    io::Failure failure;
    const int64_t size = page_bytes(read);
    failure.path = file(read).path;
    failure.offset_bytes = begin_bytes(read);
    failure.size_bytes = size;
    if (read.moved_bytes < size) {
      failure.kind = result < 0 ? io::Kind::read : result == 0 ? io::Kind::truncated : io::Kind::short_read;
      failure.error = result < 0 ? static_cast<int>(-result) : 0;
      failure.what = result < 0 ? "reading a page of a graph failed" : "a page of a graph ends early";
      failure.got = std::to_string(read.moved_bytes) + " bytes";
      failure.expected = std::to_string(size) + " bytes";
      return slot.job->fail(std::move(failure));
    }
    const auto* bytes = reinterpret_cast<const uint8_t*>(read.buffer->data);
    const char* fault =
        read.is_codes ? header_fault(bytes, size, read.page, code_salt(layout_)) : fault_of(layout_, bytes, read.page);
    if (fault != nullptr) {
      failure.kind = io::Kind::checksum;
      failure.what = "page " + std::to_string(read.page) + (read.is_codes ? " of the codes" : "") +
                     " of a graph is damaged: " + fault;
      return slot.job->fail(std::move(failure));
    }
    if (read.is_codes) {
      slot.walk.codes_arrived(read.page, bytes, true);
      code_cache_.keep(read.page, std::move(read.buffer));
      return;
    }
    slot.walk.arrived(read.page, bytes);
  }

  void look_at(size_t i, Clock::time_point now) {
    Slot& slot = slots_[i];
    if (!slot.job) return;
    if (now > slot.job->deadline) {
      io::Failure failure = make_failure(io::Kind::deadline, "searching a graph");
      failure.path = searcher_.file_->path;
      slot.job->fail(std::move(failure));
    }
    if (!slot.job->failed || slot.reads == 0) return;
    for (size_t tag = 0; tag < reads_.size(); ++tag) {
      if (reads_[tag].slot == static_cast<int64_t>(i)) queue_->cancel(tag);
    }
    // A read that never ends keeps its memory and its place; the call does not wait for it.
    release(slot);
  }

  static void write_found(const std::vector<Found>& found, int64_t k, int64_t* rows, float* distances) {
    for (int64_t i = 0; i < k; ++i) {
      const bool is_there = i < static_cast<int64_t>(found.size());
      rows[i] = is_there ? static_cast<int64_t>(found[i].row) : -1;
      distances[i] = is_there ? found[i].distance : std::numeric_limits<float>::infinity();
    }
  }

  // What the walk has found so far, where `partial` waits for it.
  void show_early(Slot& slot) {
    Job& job = *slot.job;
    const int64_t call = job.early_call;
    if (slot.shown == call || slot.walk.costs().pages < job.early_pages) return;
    slot.shown = call;
    const SearchRequest& request = *job.request;
    const int64_t k = request.walk.k;
    const auto found = slot.walk.nearest();
    std::lock_guard lock(job.mutex);
    if (job.early_call != call) return;  // the next call waits for more
    write_found(found, k, request.early_rows + slot.query * k, request.early_distances + slot.query * k);
    job.shown[slot.query] = call;
    job.changed.notify_all();
  }

  void write_result(Slot& slot) {
    const SearchRequest& request = *slot.job->request;
    const int64_t k = request.walk.k, at = slot.query;
    write_found(slot.walk.results(), k, request.rows + at * k, request.distances + at * k);
    const WalkCosts& costs = slot.walk.costs();
    request.pages[at] = costs.pages;
    request.code_pages[at] = costs.code_pages;
    request.measured[at] = costs.distances;
    request.estimated[at] = costs.estimates;
    request.seconds[at] = std::chrono::duration<float>(Clock::now() - slot.begun).count();
  }

  // The walk is not the job's any more; its reads may still be under way.
  void release(Slot& slot) {
    if (slot.released) return;
    slot.released = true;
    std::lock_guard lock(slot.job->mutex);
    --slot.job->under_way;
    --slot.job->left;
    if (!slot.job->failed) slot.job->shown[slot.query] = std::numeric_limits<int64_t>::max();
    slot.job->changed.notify_all();
  }

  void end(size_t i) {
    release(slots_[i]);
    slots_[i].released = false;
    slots_[i].job.reset();
    --busy_;
  }

  // Reads that are under way when the searcher closes. Memory that a device may still write to is never freed.
  void drain() {
    for (Slot& slot : slots_) {
      if (!slot.job) continue;
      slot.job->fail(make_failure(io::Kind::closed, "searching a graph: it was closed"));
      release(slot);
    }
    for (size_t tag = 0; tag < reads_.size(); ++tag) {
      if (reads_[tag].slot >= 0) queue_->cancel(tag);
    }
    const auto until = Clock::now() + std::chrono::duration<double>(kGraceS);
    while (in_flight_ > 0 && Clock::now() < until) {
      completions_.clear();
      queue_->wait(completions_, 1, kLongestWaitNs);
      in_flight_ -= completions_.size();
    }
    if (in_flight_ > 0) leave_behind();
  }

  // Memory that a device may still write to. Reachable for ever, on purpose.
  void leave_behind() {
    static std::mutex mutex;
    static auto* left = new std::vector<std::pair<std::deque<Read>, std::unique_ptr<io::Queue>>>();
    std::lock_guard lock(mutex);
    left->emplace_back(std::move(reads_), std::move(queue_));
  }

  GraphSearcher& searcher_;
  const PageLayout& layout_;
  PageCache code_cache_;
  std::unique_ptr<io::Queue> queue_;
  unsigned depth_ = 0;
  std::vector<Slot> slots_;
  std::vector<size_t> starved_;  // slots whose walks wait for a place in the queue
  std::vector<size_t> fresh_;    // slots whose walks have not begun
  std::deque<Read> reads_;       // by tag
  std::vector<size_t> free_reads_;
  std::vector<io::Completion> completions_;
  size_t in_flight_ = 0;
  int64_t busy_ = 0;
  Clock::time_point next_look_{};
};

GraphSearcher::GraphSearcher(GraphView view, PageFiles files, io::Direct direct, SearchOptions options)
    : view_(std::move(view)),
      options_(std::move(options)),
      files_(std::move(files)),
      pool_(std::make_shared<io::BufferPool>(0, false)),
      faults_(std::make_shared<io::FaultState>(options_.rules, options_.seed)) {
  const auto open = [&](const std::string& path) {
    return options_.path == "memory" ? io::open_memory_file(path, io::Mode::read)
                                     : io::open_file(path, io::Mode::read, direct);
  };
  file_ = open(files_.pages_path);
  if (view_.layout.paged_codes) codes_file_ = open(files_.codes_path);
  const auto work = [this] {
    std::unique_ptr<Worker> worker;
    try {
      worker = std::make_unique<Worker>(*this);  // in its own thread: a single-issuer ring belongs to it
    } catch (...) {
      std::lock_guard lock(mutex_);
      broken_ = std::current_exception();
    }
    {
      std::lock_guard lock(mutex_);
      ++started_;
      up_.notify_all();
    }
    if (!worker) return;
    io::Failure failure;
    try {
      return worker->run();
    } catch (const io::FailureError& error) {
      failure = error.failure;
    } catch (const std::exception& error) {
      failure = make_failure(io::Kind::closed, std::string("a thread that searches a graph ended: ") + error.what());
    }
    break_down(failure);
    worker->abandon(failure);
  };
  try {
    for (int i = 0; i < options_.threads; ++i) threads_.emplace_back(work);
    std::unique_lock lock(mutex_);
    up_.wait(lock, [this] { return started_ == options_.threads; });
  } catch (...) {
    close();
    throw;
  }
  if (broken_) {
    close();
    std::rethrow_exception(broken_);
  }
}

GraphSearcher::~GraphSearcher() { close(); }

std::shared_ptr<GraphSearcher::Job> GraphSearcher::start(const SearchRequest& request) {
  auto job = std::make_shared<Job>();
  job->request = &request;
  job->left = request.n_queries;
  job->shown.assign(request.n_queries, 0);
  job->deadline =
      Clock::now() + std::chrono::nanoseconds(static_cast<int64_t>(std::min(request.deadline_s, 1e9) * 1e9));
  std::lock_guard lock(mutex_);
  if (broken_) std::rethrow_exception(broken_);
  if (stopping_) throw io::FailureError(make_failure(io::Kind::closed, "searching a graph: it is closed"));
  if (request.n_queries == 0) return job;
  jobs_.push_back(job);
  work_.notify_all();
  return job;
}

void GraphSearcher::partial(const std::shared_ptr<Job>& job, int64_t pages, const std::function<bool()>& interrupted) {
  int64_t call = 0;
  {
    std::lock_guard lock(job->mutex);
    job->early_pages = pages;
    call = ++job->early_call;
  }
  wait(
      job,
      [&] {
        return std::all_of(job->shown.begin(), job->shown.end(), [call](int64_t shown) { return shown >= call; });
      },
      interrupted);
  // Walks that have ended show what they have found in the end.
  const SearchRequest& request = *job->request;
  const int64_t k = request.walk.k;
  std::lock_guard lock(job->mutex);
  for (int64_t q = 0; q < request.n_queries; ++q) {
    if (job->shown[q] != std::numeric_limits<int64_t>::max()) continue;
    std::copy_n(request.rows + q * k, k, request.early_rows + q * k);
    std::copy_n(request.distances + q * k, k, request.early_distances + q * k);
  }
}

void GraphSearcher::finish(const std::shared_ptr<Job>& job, const std::function<bool()>& interrupted) {
  wait(job, [&] { return job->left == 0; }, interrupted);
}

void GraphSearcher::cancel(const std::shared_ptr<Job>& job) {
  job->fail(make_failure(io::Kind::cancelled, "searching a graph: nobody waits for it any more"));
  {
    std::lock_guard all(mutex_);
    jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), job), jobs_.end());
  }
  std::unique_lock lock(job->mutex);
  // Nobody writes to the caller's memory once all walks have ended; reads that never do are left behind.
  job->changed.wait(lock, [&] { return job->under_way == 0; });
}

// `is_over` is asked while the job's mutex is held.
void GraphSearcher::wait(const std::shared_ptr<Job>& job, const std::function<bool()>& is_over,
                         const std::function<bool()>& interrupted) {
  std::unique_lock lock(job->mutex);
  while (!is_over() && !job->failed) {
    job->changed.wait_for(lock, std::chrono::nanoseconds(kSignalCheckNs));
    if (is_over() || job->failed) break;
    lock.unlock();
    const bool ends = interrupted();
    lock.lock();
    if (!ends) continue;
    if (!job->failure) job->failure = make_failure(io::Kind::cancelled, "searching a graph was interrupted");
    job->failed = true;
  }
  if (!job->failed) return;
  lock.unlock();
  cancel(job);
  throw io::FailureError(*job->failure);
}

void GraphSearcher::break_down(const io::Failure& failure) {
  std::lock_guard lock(mutex_);
  if (!broken_) broken_ = std::make_exception_ptr(io::FailureError(failure));
  for (const auto& job : jobs_) job->fail(failure);
  jobs_.clear();
  stopping_ = true;
  work_.notify_all();
}

void GraphSearcher::close() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    for (const auto& job : jobs_) job->fail(make_failure(io::Kind::closed, "searching a graph: it was closed"));
    jobs_.clear();
    work_.notify_all();
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

}  // namespace espnx::graph
