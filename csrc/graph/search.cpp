// See search.hpp.
#include "search.hpp"

#include <algorithm>
#include <chrono>
#include <limits>

#include "worker.hpp"

namespace espnx::graph {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kSignalCheckNs = 50'000'000;

}  // namespace

GraphSearcher::GraphSearcher(GraphView view, SearchOptions options)
    : view_(std::move(view)),
      options_(std::move(options)),
      pool_(std::make_shared<io::BufferPool>(0, false)),
      faults_(std::make_shared<io::FaultState>(options_.rules, options_.seed)) {
  const auto open = [&](const std::string& path) {
    return options_.path == "memory" ? io::open_memory_file(path, io::Mode::read)
                                     : io::open_file(path, io::Mode::read, options_.direct);
  };
  for (const PagesAt& each : view_.pages)
    files_.push_back(each.path.empty() ? nullptr : open(each.path));
  if (view_.layout.paged_codes) codes_file_ = open(view_.code_pages.path);
  const auto work = [this] {
    std::unique_ptr<Worker> worker;
    try {
      worker =
          std::make_unique<Worker>(*this);  // in its own thread: a single-issuer ring belongs to it
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
      failure = make_failure(io::Kind::closed,
                             std::string("a thread that searches a graph ended: ") + error.what());
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

const io::File& GraphSearcher::any_file() const {
  return **std::find_if(files_.begin(), files_.end(),
                        [](const std::shared_ptr<io::File>& each) { return each != nullptr; });
}

std::shared_ptr<GraphSearcher::Job> GraphSearcher::start(const SearchRequest& request) {
  auto job = std::make_shared<Job>();
  job->request = &request;
  job->left = request.n_queries;
  job->shown.assign(request.n_queries, 0);
  job->patience =
      std::chrono::nanoseconds(static_cast<int64_t>(std::min(request.deadline_s, 1e9) * 1e9));
  std::lock_guard lock(mutex_);
  if (broken_) std::rethrow_exception(broken_);
  if (stopping_)
    throw io::FailureError(make_failure(io::Kind::closed, "searching a graph: it is closed"));
  if (request.n_queries == 0) return job;
  jobs_.push_back(job);
  work_.notify_all();
  return job;
}

void GraphSearcher::partial(const std::shared_ptr<Job>& job, int64_t pages,
                            const std::function<bool()>& interrupted) {
  int64_t call = 0;
  {
    std::lock_guard lock(job->mutex);
    job->early_pages = pages;
    call = ++job->early_call;
  }
  wait(
      job,
      [&] {
        return std::all_of(job->shown.begin(), job->shown.end(),
                           [call](int64_t shown) { return shown >= call; });
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

void GraphSearcher::finish(const std::shared_ptr<Job>& job,
                           const std::function<bool()>& interrupted) {
  wait(job, [&] { return job->left == 0; }, interrupted);
}

void GraphSearcher::call_off(const std::shared_ptr<Job>& job) {
  job->fail(make_failure(io::Kind::cancelled, "searching a graph: nobody waits for it any more"));
}

void GraphSearcher::cancel(const std::shared_ptr<Job>& job) {
  call_off(job);
  {
    std::lock_guard all(mutex_);
    jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), job), jobs_.end());
  }
  std::unique_lock lock(job->mutex);
  // Nobody writes to the caller's memory once all walks have ended; reads that never do are left
  // behind.
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
    if (!job->failure)
      job->failure = make_failure(io::Kind::cancelled, "searching a graph was interrupted");
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
    for (const auto& job : jobs_)
      job->fail(make_failure(io::Kind::closed, "searching a graph: it was closed"));
    jobs_.clear();
    work_.notify_all();
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

}  // namespace espnx::graph
