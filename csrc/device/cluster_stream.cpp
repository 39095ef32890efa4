// See cluster_stream.hpp.
#include "cluster_stream.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "cpu/crc32c.hpp"

namespace espnx::device {
namespace {

constexpr int64_t kIdBytes = sizeof(int32_t);
constexpr int64_t kBatchBytes = 4 << 20;  // of clusters in one transfer
constexpr int64_t kMeasureBytes =
    128 << 10;  // that a thread takes at a time: the others find some, too
constexpr int64_t kBytesPerHelper = 256
                                    << 10;  // with fewer, waking a thread takes as long as the work
constexpr int64_t kSliceNs = 50'000'000;    // whoever waits looks up at least this often
constexpr int64_t kAtOnce = 64;             // vectors whose addresses are handed to a kernel

double seconds(io::Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

std::string hex(uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof text, "%08x", value);
  return text;
}

std::exception_ptr cancelled() {
  io::Failure failure;
  failure.kind = io::Kind::cancelled;
  failure.what = "the distances that were asked for are not needed";
  return std::make_exception_ptr(io::FailureError(failure));
}

}  // namespace

// Clusters first..first + count of a request, in one transfer.
struct ClusterStream::Batch {
  std::shared_ptr<io::Transfer> transfer;
  int64_t first = 0, count = 0, bytes = 0, measured = 0;
  std::vector<int64_t> arrived;  // places in the batch, not yet measured
  bool is_fetching = false, is_fetched = false, is_ended = false;
};

struct ClusterTicket {
  explicit ClusterTicket(ClusterRequest request) : request(std::move(request)) {}

  ClusterRequest request;
  std::vector<int64_t> size_bytes, reply_begin;
  std::vector<VectorDistance> replies;

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::deque<std::shared_ptr<ClusterStream::Batch>> batches;  // under way
  int64_t submitted = 0;                                      // clusters
  std::vector<int64_t> measured;                              // in that order
  size_t handed_out = 0;
  std::exception_ptr error;
  ClusterStream::Costs costs;

  int64_t count() const { return static_cast<int64_t>(size_bytes.size()); }
  bool is_whole() const { return static_cast<int64_t>(measured.size()) == count(); }
};

ClusterStream::ClusterStream(std::shared_ptr<io::Engine> engine, int64_t window_bytes,
                             int max_workers)
    : engine_(std::move(engine)),
      window_bytes_(window_bytes),
      workers_(max_workers, [this](const std::weak_ptr<ClusterTicket>& ticket) { work(ticket); }) {}

ClusterStream::~ClusterStream() {
  clear();
  workers_.stop();
}

ClusterStream::Ticket ClusterStream::push(ClusterRequest request) {
  auto ticket = std::make_shared<ClusterTicket>(std::move(request));
  const ClusterRequest& wanted = ticket->request;
  const int64_t entry_bytes = kIdBytes + wanted.query.vector_bytes();
  ticket->reply_begin.push_back(0);
  for (const int64_t n : wanted.n_vectors) {
    ticket->size_bytes.push_back(n * entry_bytes);
    ticket->reply_begin.push_back(ticket->reply_begin.back() + n);
  }
  ticket->replies.resize(ticket->reply_begin.back());
  try {
    std::lock_guard lock(ticket->mutex);
    submit_more(*ticket);
  } catch (...) {  // of a later batch: the earlier ones are under way
    fail(*ticket, std::current_exception());
    throw;
  }
  start_workers(ticket, ticket->reply_begin.back() * entry_bytes);
  return ticket;
}

void ClusterStream::start_workers(const Ticket& ticket, int64_t total_bytes) {
  const auto helpers =
      std::min(workers_.max_workers(), static_cast<size_t>(total_bytes / kBytesPerHelper));
  std::lock_guard lock(mutex_);
  live_.erase(
      std::remove_if(live_.begin(), live_.end(), [](const auto& each) { return each.expired(); }),
      live_.end());
  live_.push_back(ticket);
  for (size_t i = 0; i < helpers; ++i) workers_.add(ticket);
}

void ClusterStream::submit_more(ClusterTicket& ticket) {
  const ClusterRequest& wanted = ticket.request;
  while (!ticket.error && ticket.submitted < ticket.count()) {
    auto batch = std::make_shared<Batch>();
    batch->first = ticket.submitted;
    for (int64_t i = batch->first; i < ticket.count(); ++i, ++batch->count) {
      if (batch->count > 0 && batch->bytes + ticket.size_bytes[i] > kBatchBytes) break;
      batch->bytes += ticket.size_bytes[i];
    }
    {
      std::lock_guard lock(mutex_);
      if (!ticket.batches.empty() && under_way_bytes_ + batch->bytes > window_bytes_) return;
      under_way_bytes_ += batch->bytes;
    }
    const auto first = batch->first, last = first + batch->count;
    io::TransferSpec spec;
    spec.file.assign(batch->count, wanted.file);
    spec.offset_bytes.assign(wanted.offset_bytes.begin() + first,
                             wanted.offset_bytes.begin() + last);
    spec.size_bytes.assign(ticket.size_bytes.begin() + first, ticket.size_bytes.begin() + last);
    spec.deadline_s = wanted.deadline_s;
    try {
      batch->transfer = engine_->submit(std::move(spec));
    } catch (...) {
      std::lock_guard lock(mutex_);
      under_way_bytes_ -= batch->bytes;
      throw;
    }
    ticket.submitted = last;
    ticket.batches.push_back(std::move(batch));
  }
}

// Once per batch: its bytes are no longer under way.
void ClusterStream::end_batch(ClusterTicket& ticket, Batch& batch) {
  if (batch.is_ended) return;
  batch.is_ended = true;
  const Costs costs{batch.transfer->asked_bytes(), batch.transfer->moved_bytes(),
                    batch.transfer->request_count(), 0, 0};
  std::lock_guard lock(mutex_);
  under_way_bytes_ -= batch.bytes;
  for (Costs* sum : {&ticket.costs, &stats_}) {
    sum->bytes_asked += costs.bytes_asked;
    sum->bytes_moved += costs.bytes_moved;
    sum->requests += costs.requests;
  }
}

// The first error stays. Whoever computes on a batch holds it until then.
void ClusterStream::fail(ClusterTicket& ticket, std::exception_ptr error) {
  std::deque<std::shared_ptr<Batch>> ended;
  {
    std::lock_guard lock(ticket.mutex);
    if (!ticket.error && !ticket.is_whole()) ticket.error = std::move(error);
    ended.swap(ticket.batches);
    for (const auto& batch : ended) end_batch(ticket, *batch);
    ticket.changed.notify_all();
  }
  // Outside the lock: the engine's thread may wait for a transfer's.
  for (const auto& batch : ended) {
    io::Failure failure;
    failure.kind = io::Kind::cancelled;
    failure.what = "the distances that were asked for are not needed";
    batch->transfer->fail(failure);
  }
}

namespace {

// Checks one cluster and measures its vectors.
void measure_cluster(const ClusterTicket& ticket, int64_t item, const uint8_t* entries,
                     VectorDistance* reply) {
  const ClusterRequest& wanted = ticket.request;
  const int64_t n = wanted.n_vectors[item], size_bytes = ticket.size_bytes[item];
  const uint32_t found = crc32c(0, entries, size_bytes),
                 expected = static_cast<uint32_t>(wanted.crc32c[item]);
  if (found != expected) {
    io::Failure failure;
    failure.kind = io::Kind::checksum;
    failure.what = "cluster " + std::to_string(wanted.clusters[item]) + " is not what was written";
    failure.path = wanted.path;
    failure.offset_bytes = wanted.offset_bytes[item];
    failure.size_bytes = size_bytes;
    failure.got = "CRC32C " + hex(found);
    failure.expected = hex(expected);
    throw io::FailureError(failure);
  }
  const int64_t entry_bytes = kIdBytes + wanted.query.vector_bytes();
  const uint8_t* rows[kAtOnce];
  float distances[kAtOnce];
  for (int64_t begin = 0; begin < n; begin += kAtOnce) {
    const int64_t count = std::min(kAtOnce, n - begin);
    for (int64_t i = 0; i < count; ++i) rows[i] = entries + (begin + i) * entry_bytes + kIdBytes;
    wanted.query.measure(rows, count, distances);
    for (int64_t i = 0; i < count; ++i) {
      reply[begin + i].distance = distances[i];
      std::memcpy(&reply[begin + i].id, rows[i] - kIdBytes, kIdBytes);
    }
  }
}

}  // namespace

// Takes some clusters that have arrived. The caller has the lock, which is free meanwhile.
void ClusterStream::measure(ClusterTicket& ticket, const std::shared_ptr<Batch>& batch,
                            std::unique_lock<std::mutex>& lock) {
  std::vector<int64_t> taken;
  for (int64_t bytes = 0; taken.size() < batch->arrived.size() && bytes < kMeasureBytes;) {
    taken.push_back(batch->first + batch->arrived[taken.size()]);
    bytes += ticket.size_bytes[taken.back()];
  }
  batch->arrived.erase(batch->arrived.begin(),
                       batch->arrived.begin() + static_cast<int64_t>(taken.size()));
  lock.unlock();
  const auto begun = io::Clock::now();
  const auto* memory = reinterpret_cast<const uint8_t*>(batch->transfer->memory());
  for (const int64_t item : taken) {
    if (ticket.size_bytes[item] == 0) continue;
    measure_cluster(ticket, item, memory + batch->transfer->position_bytes()[item - batch->first],
                    ticket.replies.data() + ticket.reply_begin[item]);
  }
  const double took_s = seconds(io::Clock::now() - begun);
  lock.lock();
  ticket.costs.computing_s += took_s;
  {
    std::lock_guard stream_lock(mutex_);
    stats_.computing_s += took_s;
  }
  if (ticket.error) return;
  ticket.measured.insert(ticket.measured.end(), taken.begin(), taken.end());
  batch->measured += static_cast<int64_t>(taken.size());
  if (batch->measured == batch->count) {
    end_batch(ticket, *batch);
    ticket.batches.erase(std::find(ticket.batches.begin(), ticket.batches.end(), batch));
    submit_more(ticket);
  }
  ticket.changed.notify_all();
}

// Waits for clusters of a batch to arrive. The caller has the lock, which is free meanwhile.
void ClusterStream::fetch(ClusterTicket& ticket, const std::shared_ptr<Batch>& batch,
                          int64_t wait_ns, std::unique_lock<std::mutex>& lock) {
  batch->is_fetching = true;
  lock.unlock();
  const auto begun = io::Clock::now();
  std::vector<int64_t> arrived;
  bool is_last = false;
  try {
    is_last = batch->transfer->next(arrived, 1, wait_ns);
  } catch (...) {
    lock.lock();
    batch->is_fetching = false;
    throw;
  }
  const double took_s = seconds(io::Clock::now() - begun);
  lock.lock();
  batch->is_fetching = false;
  batch->is_fetched = is_last;
  batch->arrived.insert(batch->arrived.end(), arrived.begin(), arrived.end());
  ticket.costs.waiting_s += took_s;
  {
    std::lock_guard stream_lock(mutex_);
    stats_.waiting_s += took_s;
  }
  ticket.changed.notify_all();
}

// One piece of work: measuring, else fetching, else waiting for others who do.
void ClusterStream::step(ClusterTicket& ticket, int64_t wait_ns) {
  try {
    std::unique_lock lock(ticket.mutex);
    if (ticket.error || ticket.is_whole()) return;
    const auto find = [&](const auto& suits) {
      return std::find_if(ticket.batches.begin(), ticket.batches.end(),
                          [&](const auto& each) { return suits(*each); });
    };
    auto at = find([](const Batch& batch) { return !batch.arrived.empty(); });
    if (at != ticket.batches.end()) {
      const std::shared_ptr<Batch> batch = *at;
      measure(ticket, batch, lock);
      return;
    }
    at = find([](const Batch& batch) { return !batch.is_fetching && !batch.is_fetched; });
    if (at != ticket.batches.end()) {
      const std::shared_ptr<Batch> batch = *at;
      fetch(ticket, batch, wait_ns, lock);
      return;
    }
    ticket.changed.wait_for(lock, std::chrono::nanoseconds(wait_ns));
  } catch (...) {
    fail(ticket, std::current_exception());
  }
}

bool ClusterStream::next(ClusterTicket& ticket, int64_t at_least, int64_t wait_ns,
                         std::vector<int64_t>& items) {
  const auto until = io::Clock::now() + std::chrono::nanoseconds(wait_ns);
  for (bool has_tried = false;;
       has_tried = true) {  // once even without time: whoever only looks gets on, too
    const int64_t left_ns = std::chrono::nanoseconds(until - io::Clock::now()).count();
    {
      std::lock_guard lock(ticket.mutex);
      if (ticket.error) std::rethrow_exception(ticket.error);
      const auto fresh = static_cast<int64_t>(ticket.measured.size() - ticket.handed_out);
      if (ticket.is_whole() || fresh >= at_least || (left_ns <= 0 && has_tried)) {
        items.insert(items.end(), ticket.measured.begin() + static_cast<int64_t>(ticket.handed_out),
                     ticket.measured.end());
        ticket.handed_out = ticket.measured.size();
        return ticket.is_whole();
      }
    }
    step(ticket, std::clamp<int64_t>(left_ns, 0, kSliceNs));
  }
}

void ClusterStream::work(const std::weak_ptr<ClusterTicket>& wanted) {
  const Ticket ticket = wanted.lock();
  const auto has_work = [&] {
    std::lock_guard lock(ticket->mutex);
    return !ticket->error && !ticket->is_whole();
  };
  while (ticket && has_work()) step(*ticket, kSliceNs);
}

const std::vector<VectorDistance>& ClusterStream::replies(const ClusterTicket& ticket) {
  return ticket.replies;
}

ClusterStream::Costs ClusterStream::costs(ClusterTicket& ticket) {
  std::lock_guard lock(ticket.mutex);
  return ticket.costs;
}

void ClusterStream::forget(ClusterTicket& ticket) { fail(ticket, cancelled()); }

void ClusterStream::clear() {
  std::vector<Ticket> all;
  {
    std::lock_guard lock(mutex_);
    for (const auto& each : live_) {
      if (Ticket ticket = each.lock()) all.push_back(std::move(ticket));
    }
  }
  workers_.clear();
  for (const Ticket& ticket : all) forget(*ticket);
}

ClusterStream::Costs ClusterStream::stats() {
  std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace espnx::device
