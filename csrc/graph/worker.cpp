// See worker.hpp.
#include "worker.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

namespace espnx::graph {
namespace {

constexpr int64_t kLongestWaitNs = 200'000'000;

}  // namespace

GraphSearcher::Worker::Worker(GraphSearcher& searcher)
    : searcher_(searcher),
      layout_(searcher.view_.layout),
      code_cache_(searcher.options_.code_cache_bytes / kCodePageBytes),
      depth_(std::min<int64_t>(4096, searcher.options_.walks * kBeamAhead)),
      queue_(make_queue(), searcher.options_.grace_ns),
      slots_(searcher.options_.walks) {}

std::unique_ptr<io::Queue> GraphSearcher::Worker::make_queue() {
  auto& options = searcher_.options_;
  std::string effective, reason;
  auto queue = io::make_queue(options.path, static_cast<unsigned>(depth_), 32, effective, reason);
  if (!options.rules.empty()) queue = io::make_faulty_queue(std::move(queue), searcher_.faults_);
  std::lock_guard lock(searcher_.mutex_);
  searcher_.effective_ = effective;
  searcher_.fallback_reason_ = reason;
  return queue;
}

void GraphSearcher::Worker::run() {
  while (take_queries()) {
    step();
  }
  drain();
}

void GraphSearcher::Worker::abandon(const io::Failure& failure) {
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (!slot.job) continue;
    slot.job->fail(failure);
    end(i);
  }
  queue_.leave_behind();
}

bool GraphSearcher::Worker::take_queries() {
  std::unique_lock lock(searcher_.mutex_);
  searcher_.work_.wait(
      lock, [&] { return searcher_.stopping_ || busy_ > 0 || !searcher_.jobs_.empty(); });
  if (searcher_.stopping_) return false;
  // A share of what is there, so that a small batch goes to all threads.
  int64_t share = 1;
  for (const auto& job : searcher_.jobs_)
    share += (job->request->n_queries - job->next) / searcher_.options_.threads;
  for (size_t i = 0; i < slots_.size() && !searcher_.jobs_.empty() && share > 0; ++i) {
    if (slots_[i].job) continue;
    // In turn, so that a query alone does not wait behind somebody's batch.
    auto job = searcher_.jobs_.front();
    searcher_.jobs_.pop_front();
    slots_[i].query = job->next++;
    if (job->next < job->request->n_queries) searcher_.jobs_.push_back(job);
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

void GraphSearcher::Worker::step() {
  for (const size_t i : fresh_) begin(i);
  fresh_.clear();
  if (queue_.in_flight() == 0) return;
  // Several at a time: a system call for each page that arrives would leave the drive with fewer
  // reads to work on meanwhile.
  queue_.wait(std::max<size_t>(1, queue_.awaited() / 4), kLongestWaitNs,
              [&](Read read, io::Progress progress, int64_t) {
                ended(std::move(read), std::move(progress));
              });
  std::vector<size_t> starved;
  starved.swap(starved_);
  for (const size_t i : starved) go_on(i);
  const auto now = Clock::now();
  if (now < next_look_) return;
  next_look_ = now + std::chrono::milliseconds(50);
  for (size_t i = 0; i < slots_.size(); ++i) look_at(i, now);
}

void GraphSearcher::Worker::begin(size_t i) {
  Slot& slot = slots_[i];
  const SearchRequest& request = *slot.job->request;
  slot.begun = Clock::now();
  slot.pages = slot.shown = 0;
  if (slot.job->failed) return end(i);
  const int64_t* parts = nullptr;
  int64_t n_parts = 0;
  if (request.parts != nullptr) {
    parts = request.parts + request.parts_begin[slot.query];
    n_parts = request.parts_begin[slot.query + 1] - request.parts_begin[slot.query];
  }
  slot.walk.begin(
      searcher_.view_, request.walk, request.queries + slot.query * request.query_bytes,
      request.queries_f32 + slot.query * layout_.dim, request.filter,
      request.absent == nullptr ? nullptr : request.absent + slot.query * searcher_.view_.copies,
      parts, n_parts);
  go_on(i);
}

void GraphSearcher::Worker::go_on(size_t i) {
  Slot& slot = slots_[i];
  if (slot.job->failed) {
    if (slot.reads == 0) end(i);
    return;
  }
  while (queue_.in_flight() < depth_) {
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

int64_t GraphSearcher::Worker::begin_bytes(const Read& read) const {
  const GraphView& view = searcher_.view_;
  if (read.want.is_codes) return view.code_pages.begin + read.want.page * kCodePageBytes;
  const Part& part = *read.at.part;
  return view.pages[part.file].begin + (part.file_page + read.at.page) * layout_.page_bytes;
}

void GraphSearcher::Worker::start_read(size_t i, Want want) {
  Read read{static_cast<int64_t>(i), want, {}, nullptr};
  if (!want.is_codes) read.at = slots_[i].walk.place_of(want.page);
  const int64_t size = page_bytes(read);
  if (!buffers_.empty()) {
    read.buffer = std::move(buffers_.back());
    buffers_.pop_back();
  }
  if (!read.buffer || read.buffer->capacity_bytes < size) read.buffer = searcher_.pool_->take(size);
  const io::Piece piece{io::Op::read,      &file(read), begin_bytes(read),
                        read.buffer->data, size,        size};
  ++slots_[i].reads;
  queue_.submit(std::move(read), piece);
}

void GraphSearcher::Worker::ended(Read read, io::Progress progress) {
  const auto slot = static_cast<size_t>(read.slot);
  Job& job = *slots_[slot].job;
  --slots_[slot].reads;
  if (progress.step == io::Step::failed) {
    progress.failure.what =
        progress.failure.kind == io::Kind::truncated    ? "a page of a graph ends early"
        : progress.failure.kind == io::Kind::short_read ? "reading a page of a graph stays short"
                                                        : "reading a page of a graph failed";
    job.fail(std::move(progress.failure));
  } else if (!job.failed) {
    take(read);
  }
  if (read.buffer) buffers_.push_back(std::move(read.buffer));
  go_on(slot);
}

void GraphSearcher::Worker::take(Read& read) {
  Slot& slot = slots_[read.slot];
  io::Failure failure;
  const int64_t size = page_bytes(read);
  failure.path = file(read).path;
  failure.offset_bytes = begin_bytes(read);
  failure.size_bytes = size;
  const auto* bytes = reinterpret_cast<const uint8_t*>(read.buffer->data);
  const bool is_codes = read.want.is_codes;
  const int64_t page = read.want.page;
  const int64_t number = is_codes ? page : read.at.part->first_page + read.at.page;
  const char* fault =
      is_codes ? header_fault(bytes, size, page, code_salt(searcher_.view_.parts.front()))
               : fault_of(layout_, *read.at.part, bytes, read.at.page);
  if (fault != nullptr) {
    failure.kind = io::Kind::checksum;
    failure.what = "page " + std::to_string(number) + (is_codes ? " of the codes" : "") +
                   " of a graph is damaged: " + fault;
    return slot.job->fail(std::move(failure));
  }
  if (is_codes) {
    slot.walk.codes_arrived(page, bytes, true);
    code_cache_.keep(page, std::move(read.buffer));
    return;
  }
  if (!slot.walk.fits_filter(page, bytes)) {
    failure.kind = io::Kind::checksum;
    failure.what =
        "page " + std::to_string(number) + " of a graph has other rows than its file of rows says";
    return slot.job->fail(std::move(failure));
  }
  slot.walk.arrived(page, bytes);
  ++slot.pages;
}

void GraphSearcher::Worker::look_at(size_t i, Clock::time_point now) {
  Slot& slot = slots_[i];
  if (!slot.job) return;
  if (now - slot.begun > slot.job->patience) {
    io::Failure failure = make_failure(io::Kind::deadline, "searching a graph");
    failure.path = searcher_.any_file().path;
    slot.job->fail(std::move(failure));
  }
  if (!slot.job->failed || slot.reads == 0) return;
  // A read that never ends keeps its memory and its place with the queue; the call does not wait
  // for it, and the next walk has the slot.
  queue_.give_up([&](const Read& read) { return read.slot == static_cast<int64_t>(i); });
  slot.reads = 0;
  end(i);
}

void GraphSearcher::Worker::write_found(const std::vector<Found>& found, int64_t k, int64_t* rows,
                                        float* distances) {
  for (int64_t i = 0; i < k; ++i) {
    const bool is_there = i < static_cast<int64_t>(found.size());
    rows[i] = is_there ? found[i].id : -1;
    distances[i] = is_there ? found[i].distance : std::numeric_limits<float>::infinity();
  }
}

void GraphSearcher::Worker::show_early(Slot& slot) {
  Job& job = *slot.job;
  const int64_t call = job.early_call;
  if (slot.shown == call || slot.pages < job.early_pages) return;
  slot.shown = call;
  const SearchRequest& request = *job.request;
  const int64_t k = request.walk.k;
  const auto found = slot.walk.nearest();
  std::lock_guard lock(job.mutex);
  if (job.early_call != call) return;  // the next call waits for more
  write_found(found, k, request.early_rows + slot.query * k,
              request.early_distances + slot.query * k);
  job.shown[slot.query] = call;
  job.changed.notify_all();
}

void GraphSearcher::Worker::write_result(Slot& slot) {
  const SearchRequest& request = *slot.job->request;
  const int64_t k = request.walk.k, at = slot.query;
  write_found(slot.walk.nearest(), k, request.rows + at * k, request.distances + at * k);
  const WalkCosts& costs = slot.walk.costs();
  request.pages[at] = costs.pages;
  request.code_pages[at] = costs.code_pages;
  request.measured[at] = costs.distances;
  request.estimated[at] = costs.estimates;
  request.seconds[at] = std::chrono::duration<float>(Clock::now() - slot.begun).count();
}

void GraphSearcher::Worker::end(size_t i) {
  const std::shared_ptr<Job> job = std::move(slots_[i].job);
  slots_[i].job.reset();
  --busy_;
  std::lock_guard lock(job->mutex);
  --job->under_way;
  --job->left;
  if (!job->failed) job->shown[slots_[i].query] = std::numeric_limits<int64_t>::max();
  job->changed.notify_all();
}

void GraphSearcher::Worker::drain() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].job) continue;
    slots_[i].job->fail(make_failure(io::Kind::closed, "searching a graph: it was closed"));
    end(i);
  }
  queue_.release();
}

}  // namespace espnx::graph
