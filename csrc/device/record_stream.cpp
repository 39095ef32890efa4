// See record_stream.hpp.
#include "record_stream.hpp"

#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>

namespace espnx::device {
namespace {

// Records per scoring call: enough to amortise the call, few enough that the first are scored while
// the last are being read. `kParts` of a read, but not fewer than `kLeast`.
constexpr int64_t kLeast = 16, kParts = 16;
constexpr int64_t kSliceNs =
    50'000'000;  // whoever waits for a worker's turn looks up at least this often

double seconds(io::Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

io::Failure cancelled() {
  io::Failure failure;
  failure.kind = io::Kind::cancelled;
  failure.what = "the records that were asked for are not needed";
  return failure;
}

}  // namespace

struct RecordTicket {
  RecordRequest request;
  std::vector<int64_t> offset_bytes, size_bytes, files;
  int64_t total_bytes = 0;

  // The stream's mutex guards these.
  std::shared_ptr<io::Transfer> transfer;  // null: in line
  bool is_counted = false;                 // in ahead_bytes_
  bool is_forgotten = false;
  std::exception_ptr refused;  // by the engine, when its turn in line came

  // Whoever holds this makes the next step: a worker, or the thread that asks. What follows is
  // guarded by it.
  std::timed_mutex turn;
  std::optional<RecordScorer> scorer;
  std::vector<float> scores;
  std::vector<int64_t> arrived, batch;  // scored, in the order of arrival; not yet scored
  size_t handed_out = 0;
  bool is_finished = false;
  int64_t damaged = -1;
  std::exception_ptr error;
  double waiting_s = 0, asked_waiting_s = 0, computing_s = 0;
  io::Clock::time_point finished_at;

  int64_t count() const { return static_cast<int64_t>(request.numbers.size()); }

  std::vector<RecordQuery> queries() const {
    std::vector<RecordQuery> found;
    for (const OwnQuery& query : request.queries) {
      found.push_back({query.tokens.data(), query.n_tokens, query.cls.data(), query.cls_weight});
    }
    return found;
  }

  RecordItems items() const {
    return {reinterpret_cast<const uint8_t*>(transfer->memory()), transfer->memory_bytes(),
            transfer->position_bytes().data(), request.numbers.data(), request.kept->n_tokens};
  }
};

RecordStream::RecordStream(std::shared_ptr<io::Engine> engine, int64_t window_bytes,
                           int max_workers)
    : engine_(std::move(engine)),
      window_bytes_(window_bytes),
      workers_(max_workers, [this](const Ticket& ticket) { work(ticket); }) {}

RecordStream::~RecordStream() {
  clear();
  workers_.stop();
}

RecordStream::Ticket RecordStream::push(RecordRequest request) {
  auto ticket = std::make_shared<RecordTicket>();
  ticket->request = std::move(request);
  const RecordRequest& wanted = ticket->request;
  const KeptRecords& kept = *wanted.kept;
  const int64_t count = ticket->count();
  ticket->scores.resize(
      wanted.pair_item.empty() && wanted.queries.size() == 1 ? count : wanted.pair_item.size());
  for (auto* column : {&ticket->files, &ticket->offset_bytes, &ticket->size_bytes})
    column->resize(count);
  locate_records(wanted.numbers.data(), count, kept.n_tokens, kept.group_offset_bytes,
                 kept.segment_begin.data(), static_cast<int64_t>(kept.segment_begin.size()),
                 kept.rules.shape, ticket->files.data(), ticket->offset_bytes.data(),
                 ticket->size_bytes.data());
  for (int64_t& file : ticket->files) file = kept.files[file];
  ticket->total_bytes =
      std::accumulate(ticket->size_bytes.begin(), ticket->size_bytes.end(), int64_t{0});
  std::lock_guard lock(mutex_);
  live_.erase(
      std::remove_if(live_.begin(), live_.end(), [](const auto& each) { return each.expired(); }),
      live_.end());
  live_.push_back(ticket);
  if (wanted.is_urgent || ahead_bytes_ == 0 ||
      (line_.empty() && ahead_bytes_ + ticket->total_bytes <= window_bytes_)) {
    submit(ticket);
  } else {
    line_.push_back(ticket);
  }
  return ticket;
}

void RecordStream::submit(const Ticket& ticket) {
  const RecordRequest& wanted = ticket->request;
  io::TransferSpec spec;
  spec.file = std::move(ticket->files);
  spec.offset_bytes = std::move(ticket->offset_bytes);
  spec.size_bytes = std::move(ticket->size_bytes);
  spec.gap_bytes = wanted.gap_bytes;
  spec.priority = wanted.is_urgent ? 1 : 0;
  spec.deadline_s = wanted.deadline_s;
  ticket->transfer = engine_->submit(std::move(spec));
  if (wanted.is_urgent) return;
  ahead_bytes_ += ticket->total_bytes;
  ticket->is_counted = true;
  workers_.add(ticket);
}

void RecordStream::pump() {
  while (!line_.empty() &&
         (ahead_bytes_ == 0 || ahead_bytes_ + line_.front()->total_bytes <= window_bytes_)) {
    const Ticket next = std::move(line_.front());
    line_.pop_front();
    try {
      submit(next);
    } catch (...) {
      next->refused = std::current_exception();
    }
  }
}

void RecordStream::submit_now(RecordTicket& ticket) {
  std::lock_guard lock(mutex_);
  if (ticket.is_forgotten) throw io::FailureError(cancelled());
  if (ticket.refused) std::rethrow_exception(ticket.refused);
  if (ticket.transfer) return;
  const auto at = std::find_if(line_.begin(), line_.end(),
                               [&](const Ticket& each) { return each.get() == &ticket; });
  const Ticket wanted = *at;
  line_.erase(at);
  wanted->request.is_urgent = true;  // somebody waits for it: that thread scores it
  submit(wanted);
}

// Once per ticket: its bytes are no longer ahead of anybody.
void RecordStream::end(RecordTicket& ticket) {
  std::lock_guard lock(mutex_);
  stats_.waiting_s += ticket.waiting_s;
  stats_.computing_s += ticket.computing_s;
  if (ticket.transfer) {
    stats_.bytes_asked += ticket.transfer->asked_bytes();
    stats_.bytes_moved += ticket.transfer->moved_bytes();
    stats_.requests += ticket.transfer->request_count();
  }
  if (!ticket.is_counted) return;
  ticket.is_counted = false;
  ahead_bytes_ -= ticket.total_bytes;
  pump();
}

// Waits for a batch of arrivals, checks and scores it. The caller has the turn, and there is more
// to come.
void RecordStream::step(RecordTicket& ticket, int64_t at_least, int64_t wait_ns,
                        bool is_asked_for) {
  try {
    const RecordRequest& wanted = ticket.request;
    if (!ticket.scorer) {
      const RecordPairs pairs{wanted.pair_item.empty() ? nullptr : wanted.pair_item.data(),
                              wanted.pair_query.data(),
                              static_cast<int64_t>(wanted.pair_item.size())};
      ticket.scorer.emplace(wanted.kept->rules, ticket.items(), ticket.queries(), pairs,
                            wanted.max_threads, ticket.scores.data());
    }
    const auto begun = io::Clock::now();
    const auto held = static_cast<int64_t>(ticket.batch.size());
    const bool is_last =
        ticket.transfer->next(ticket.batch, std::max<int64_t>(1, at_least - held), wait_ns);
    const auto here = io::Clock::now();
    ticket.waiting_s += seconds(here - begun);
    if (is_asked_for) ticket.asked_waiting_s += seconds(here - begun);
    if (!is_last && static_cast<int64_t>(ticket.batch.size()) < at_least) return;
    ticket.damaged = find_damaged(wanted.kept->rules, ticket.items(), ticket.batch);
    const bool has_scores = !ticket.scores.empty();
    if (ticket.damaged < 0 && has_scores) ticket.damaged = ticket.scorer->score(ticket.batch);
    ticket.finished_at = io::Clock::now();
    ticket.computing_s += seconds(ticket.finished_at - here);
    ticket.is_finished = is_last || ticket.damaged >= 0;
    if (ticket.damaged < 0)
      ticket.arrived.insert(ticket.arrived.end(), ticket.batch.begin(), ticket.batch.end());
    ticket.batch.clear();
  } catch (...) {
    ticket.error = std::current_exception();
    ticket.is_finished = true;
  }
  if (ticket.is_finished) end(ticket);
}

bool RecordStream::next(RecordTicket& ticket, int64_t at_least, int64_t wait_ns,
                        std::vector<int64_t>& items) {
  const auto until = io::Clock::now() + std::chrono::nanoseconds(wait_ns);
  const int64_t per_batch = std::max(kLeast, ticket.count() / kParts);
  submit_now(ticket);
  for (;;) {
    const auto now = io::Clock::now();
    const int64_t left_ns = std::chrono::nanoseconds(until - now).count();
    if (ticket.turn.try_lock_for(
            std::chrono::nanoseconds(std::clamp<int64_t>(left_ns, 0, kSliceNs)))) {
      std::lock_guard turn(ticket.turn, std::adopt_lock);
      if (ticket.count() == 0) ticket.is_finished = true;
      const auto fresh = [&] {
        return static_cast<int64_t>(ticket.arrived.size() - ticket.handed_out);
      };
      if (!ticket.is_finished && fresh() < at_least) {
        step(ticket, std::min(per_batch, at_least), std::clamp<int64_t>(left_ns, 0, kSliceNs),
             true);
      }
      if (ticket.error) std::rethrow_exception(ticket.error);
      if (ticket.is_finished || fresh() >= at_least) {
        items.insert(items.end(), ticket.arrived.begin() + static_cast<int64_t>(ticket.handed_out),
                     ticket.arrived.end());
        ticket.handed_out = ticket.arrived.size();
        return ticket.is_finished;
      }
    }
    if (left_ns <= 0) return false;
  }
}

void RecordStream::work(const Ticket& ticket) {
  const int64_t per_batch = std::max(kLeast, ticket->count() / kParts);
  for (bool is_finished = false; !is_finished;) {
    std::lock_guard turn(ticket->turn);
    if (!ticket->is_finished) step(*ticket, per_batch, kSliceNs, false);
    is_finished = ticket->is_finished;
  }
}

const std::vector<float>& RecordStream::scores(const RecordTicket& ticket) { return ticket.scores; }

int64_t RecordStream::damaged(const RecordTicket& ticket) { return ticket.damaged; }

std::vector<float> RecordStream::score_more(RecordTicket& ticket,
                                            const std::vector<int64_t>& pair_item,
                                            const std::vector<int64_t>& pair_query) {
  std::vector<float> scores(pair_item.size());
  const RecordPairs pairs{pair_item.data(), pair_query.data(),
                          static_cast<int64_t>(pair_item.size())};
  RecordScorer scorer(ticket.request.kept->rules, ticket.items(), ticket.queries(), pairs,
                      ticket.request.max_threads, scores.data());
  std::vector<int64_t> items = pair_item;
  items.erase(std::unique(items.begin(), items.end()), items.end());
  scorer.score(items);  // of centroids that are in the codebook: they were scored before
  return scores;
}

std::shared_ptr<io::Transfer> RecordStream::transfer(RecordTicket& ticket) {
  return ticket.transfer;
}

RecordStream::Costs RecordStream::costs(RecordTicket& ticket) {
  std::lock_guard turn(ticket.turn);
  Costs costs;
  if (ticket.transfer) {
    costs.bytes_asked = ticket.transfer->asked_bytes();
    costs.bytes_moved = ticket.transfer->moved_bytes();
    costs.requests = ticket.transfer->request_count();
  }
  costs.waiting_s = ticket.asked_waiting_s;
  costs.computing_s = ticket.computing_s;
  costs.age_s = ticket.is_finished ? seconds(io::Clock::now() - ticket.finished_at) : -1.0;
  return costs;
}

void RecordStream::forget(RecordTicket& ticket) {
  std::shared_ptr<io::Transfer> under_way;
  {
    std::lock_guard lock(mutex_);
    ticket.is_forgotten = true;
    under_way = ticket.transfer;
    const auto at = std::find_if(line_.begin(), line_.end(),
                                 [&](const Ticket& each) { return each.get() == &ticket; });
    if (at != line_.end()) line_.erase(at);
    if (ticket.is_counted) {
      ticket.is_counted = false;
      ahead_bytes_ -= ticket.total_bytes;
    }
  }
  // Outside the lock: whoever waits for it wakes up and wants it.
  if (under_way) under_way->fail(cancelled());
  std::lock_guard lock(mutex_);
  pump();
}

void RecordStream::clear() {
  std::vector<Ticket> all;
  {
    std::lock_guard lock(mutex_);
    for (const auto& each : live_) {
      if (Ticket ticket = each.lock()) all.push_back(std::move(ticket));
    }
    for (const Ticket& ticket : line_) ticket->is_forgotten = true;
    line_.clear();
  }
  for (const Ticket& ticket : all) forget(*ticket);
}

RecordStream::Stats RecordStream::stats() {
  std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace espnx::device
