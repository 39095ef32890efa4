// See row_stream.hpp.
#include "row_stream.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <new>
#include <string>
#include <thread>
#include <unordered_map>

#include "cpu/aligned.hpp"
#include "cpu/crc32c.hpp"
#include "cpu/parallel.hpp"

namespace espnx::device {

namespace {

constexpr int64_t kSignalCheckNs = 50'000'000;  // Ctrl-C is seen at least this often

double seconds_since(io::Clock::time_point begun) {
  return std::chrono::duration<double>(io::Clock::now() - begun).count();
}

io::FailureError failure(io::Kind kind, const std::string& what) {
  io::Failure failure;
  failure.kind = kind;
  failure.what = what;
  return io::FailureError(failure);
}

io::FailureError forgotten() {
  return failure(io::Kind::cancelled, "the rows that were asked for are not needed");
}

// Where each thread folds rows in. The first that comes to a (sequence, head) has the caller's
// state of it, to itself until all is read; whoever comes later has one of its own there. So many
// short sequences, each of which one read holds, cost no second state and no merging.
class States {
 public:
  States(const RowQueries& queries, int n_threads)
      : queries_(queries), owners_(queries.n_sequences * queries.n_heads), own_(n_threads) {}

  AttentionState of(int thread, int64_t sequence, int64_t head) {
    const int64_t group = sequence * queries_.n_heads + head;
    int owner = kNobody;
    if (owners_[group].compare_exchange_strong(owner, thread + 1, std::memory_order_relaxed) ||
        owner == thread + 1) {
      return whole(group);
    }
    const auto [found, is_new] = own_[thread].try_emplace(group, queries_.n * (queries_.dv + 2));
    const AttentionState state = inside(found->second);
    if (is_new) {
      found->second.fill(0);
      std::fill_n(state.m, queries_.n, -std::numeric_limits<float>::infinity());
    }
    return state;
  }

  // Into the caller's states, once no thread works any more.
  void merge() {
    for (auto& of_thread : own_) {
      for (auto& [group, floats] : of_thread) {
        merge_attention(whole(group), inside(floats), queries_.n, queries_.dv);
      }
    }
  }

 private:
  static constexpr int kNobody = 0;

  AttentionState whole(int64_t group) const {
    return state_of_group(queries_, {queries_.o, queries_.m, queries_.l}, 0, group);
  }
  AttentionState inside(AlignedFloats& floats) const {
    float* o = floats.data();
    return {o, o + queries_.n * queries_.dv, o + queries_.n * (queries_.dv + 1)};
  }

  const RowQueries& queries_;
  std::vector<std::atomic<int>> owners_;  // of each group: a thread's number from 1
  std::vector<std::unordered_map<int64_t, AlignedFloats>> own_;  // of each thread, by group
};

}  // namespace

struct RowStream::Reading {
  Reading(RowRequest wanted, const std::shared_ptr<io::BufferPool>& pool)
      : request(std::move(wanted)), plan(pool) {}

  RowRequest request;
  // The stream's mutex guards these. Planned when its turn to be read comes: many are in line, for
  // all that is stored.
  bool is_planned = false;
  RowPlan plan;  // does not change once it is made
  std::vector<std::shared_ptr<io::Transfer>>
      transfers;  // by unit; null: not submitted, or consumed
  size_t n_submitted = 0;
  bool is_taken = false;  // somebody consumes it
  bool is_forgotten =
      false;  // no longer in line: its bytes count no more, and nothing is submitted for it

  std::atomic<size_t> n_taken{0};
  std::atomic<bool> stopped{false};
  std::mutex mutex;
  std::exception_ptr error;  // the first
  double waiting_s = 0, computing_s = 0;
  int64_t moved_bytes = 0;
};

RowStream::RowStream(std::shared_ptr<io::Engine> engine, int64_t window_bytes, double deadline_s)
    : engine_(std::move(engine)),
      first_window_bytes_(window_bytes),
      window_bytes_(window_bytes),
      deadline_s_(deadline_s) {}

RowStream::~RowStream() {
  if (!engine_->in_own_process()) return;
  clear();
  widen(first_window_bytes_);  // the engine may serve others
}

void RowStream::widen(int64_t window_bytes) {
  // Memory of reads goes round: mapped anew for each, it would cost as much as its rows.
  engine_->pool()->keep(window_bytes - window_bytes_);
  window_bytes_ = window_bytes;
}

void RowStream::reach(int64_t window_bytes) {
  std::lock_guard lock(mutex_);
  const bool is_wider = window_bytes > window_bytes_;
  widen(std::max(window_bytes, first_window_bytes_));
  if (is_wider) pump();
}

int64_t RowStream::push(RowRequest request) {
  auto reading = std::make_shared<Reading>(std::move(request), engine_->pool());
  try {
    std::lock_guard lock(mutex_);
    reading->request.ticket = next_ticket_++;
    line_.push_back(reading);
    pump();
    return reading->request.ticket;
  } catch (...) {
    clear();  // nobody has a ticket of what stands at the end of the line now
    throw;
  }
}

int64_t RowStream::front() {
  std::lock_guard lock(mutex_);
  return line_.empty() ? -1 : line_.front()->request.ticket;
}

void RowStream::clear() {
  std::vector<std::shared_ptr<io::Transfer>> under_way;
  {
    std::lock_guard lock(mutex_);
    for (const auto& reading : line_) {
      reading->is_forgotten = true;
      for (const auto& transfer : reading->transfers) {
        if (transfer) under_way.push_back(transfer);
      }
    }
    line_.clear();
    ahead_bytes_ = 0;
  }
  // Outside the lock: whoever waits for one of these wakes up and wants it.
  for (const auto& transfer : under_way) transfer->fail(forgotten().failure);
}

RowStream::Stats RowStream::stats() {
  std::lock_guard lock(mutex_);
  Stats found = stats_;
  for (const auto& reading : line_) {
    for (size_t unit = 0; unit < reading->n_submitted; ++unit) {
      const auto& transfer = reading->transfers[unit];
      if (transfer && !transfer->failed() && transfer->finished())
        found.ahead_bytes += reading->plan.units[unit].size_bytes;
    }
  }
  return found;
}

void RowStream::plan(Reading& reading) {
  if (reading.is_planned) return;
  const RowRequest& request = reading.request;
  reading.plan = plan_rows(request.segments, request.geometry, request.unit_bytes, engine_->pool());
  reading.transfers.resize(reading.plan.units.size());
  reading.is_planned = true;
}

void RowStream::submit(Reading& reading, size_t unit) {
  const RowUnit& wanted = reading.plan.units[unit];
  io::TransferSpec spec;
  spec.file = {wanted.file};
  spec.offset_bytes = {wanted.offset_bytes};
  spec.size_bytes = {wanted.size_bytes};
  spec.deadline_s = deadline_s_;
  reading.transfers[unit] = engine_->submit(std::move(spec));
  ahead_bytes_ += wanted.size_bytes;
  stats_.most_ahead_bytes = std::max(stats_.most_ahead_bytes, ahead_bytes_);
  reading.n_submitted = unit + 1;
}

void RowStream::pump() {
  try {
    fill();
  } catch (const std::bad_alloc&) {
    if (window_bytes_ == first_window_bytes_) throw;
    widen(first_window_bytes_);  // no further than the memory that there is
  }
}

void RowStream::fill() {
  for (const auto& reading : line_) {
    if (!reading->is_planned && ahead_bytes_ >= window_bytes_) return;
    plan(*reading);
    for (size_t unit = reading->n_submitted; unit < reading->transfers.size(); ++unit) {
      const int64_t size_bytes = reading->plan.units[unit].size_bytes;
      if (ahead_bytes_ > 0 && ahead_bytes_ + size_bytes > window_bytes_) return;
      submit(*reading, unit);
    }
  }
}

std::shared_ptr<RowStream::Reading> RowStream::take_front(int64_t ticket) {
  std::lock_guard lock(mutex_);
  if (line_.empty() || line_.front()->request.ticket != ticket) {
    throw failure(io::Kind::invalid, "rows are consumed in the order in which they were asked for");
  }
  plan(*line_.front());
  return line_.front();
}

bool RowStream::is_forgotten(const Reading& reading) {
  std::lock_guard lock(mutex_);
  return reading.is_forgotten;
}

void RowStream::check(const Reading& reading, const RowUnit& unit, const char* memory) const {
  const int64_t block_bytes = reading.request.geometry.block_bytes;
  int64_t at_bytes = 0;
  for (const RowSums& sums : reading.plan.sums(unit)) {
    for (const uint32_t expected : sums) {
      const uint32_t got = crc32c(0, memory + at_bytes, block_bytes);
      at_bytes += block_bytes;
      if (got == expected) continue;
      io::Failure damage;
      damage.kind = io::Kind::checksum;
      damage.what = "stored rows are damaged";
      damage.path = engine_->file(unit.file)->path;
      damage.offset_bytes = unit.offset_bytes + at_bytes - block_bytes;
      damage.size_bytes = block_bytes;
      damage.got = "CRC32C " + std::to_string(got);
      damage.expected = "CRC32C " + std::to_string(expected);
      throw io::FailureError(damage);
    }
  }
}

// Takes unit after unit until there are none. `interrupted` is given to the caller's own thread
// alone.
void RowStream::work(Reading& reading, int thread, const Arrived& arrived,
                     const std::function<bool()>* interrupted) {
  double waiting_s = 0, computing_s = 0;
  int64_t moved_bytes = 0;
  try {
    for (;;) {
      const size_t i = reading.n_taken.fetch_add(1);
      if (i >= reading.transfers.size() || reading.stopped) break;
      const RowUnit& unit = reading.plan.units[i];
      std::shared_ptr<io::Transfer> transfer;
      {
        std::lock_guard lock(mutex_);
        if (reading.is_forgotten) throw forgotten();
        // The window is full of units that others are working on: this one is needed now.
        while (reading.n_submitted <= i) submit(reading, reading.n_submitted);
        transfer = reading.transfers[i];
      }
      const auto begun = io::Clock::now();
      std::vector<int64_t> items;
      while (!transfer->next(items, 1, kSignalCheckNs)) {
        if (reading.stopped) return;
        if (interrupted != nullptr && (*interrupted)())
          throw failure(io::Kind::cancelled, "interrupted");
      }
      waiting_s += seconds_since(begun);
      const auto computing = io::Clock::now();
      const char* memory = transfer->memory() + transfer->position_bytes()[0];
      check(reading, unit, memory);
      arrived(reading, unit, memory, thread);
      computing_s += seconds_since(computing);
      moved_bytes += transfer->moved_bytes();
      transfer->release_memory();  // for the next read
      std::lock_guard lock(mutex_);
      reading.transfers[i].reset();
      if (!reading.is_forgotten) ahead_bytes_ -= unit.size_bytes;
      pump();
    }
  } catch (...) {
    std::lock_guard lock(reading.mutex);
    if (!reading.error) reading.error = std::current_exception();
    reading.stopped = true;
  }
  std::lock_guard lock(reading.mutex);
  reading.waiting_s += waiting_s;
  reading.computing_s += computing_s;
  reading.moved_bytes += moved_bytes;
}

void RowStream::consume(Reading& reading, int n_threads, const Arrived& arrived,
                        const std::function<bool()>& interrupted) {
  {
    std::lock_guard lock(mutex_);
    if (reading.is_taken)
      throw failure(io::Kind::invalid, "these rows are being consumed in another thread");
    reading.is_taken = true;
  }
  std::vector<std::thread> helpers;
  try {
    for (int i = 1; i < n_threads; ++i) {
      helpers.emplace_back([this, &reading, i, &arrived] { work(reading, i, arrived, nullptr); });
    }
  } catch (const std::exception&) {
    // No thread to be had: the caller's own does all of it.
  }
  work(reading, 0, arrived, &interrupted);
  for (std::thread& helper : helpers) helper.join();
  if (reading.error) {
    // Also what came after: whoever catches this plans anew. Unless another thread has cleared, and
    // perhaps pushed since.
    if (!is_forgotten(reading)) clear();
    std::rethrow_exception(reading.error);
  }
  std::lock_guard lock(mutex_);
  if (!reading.is_forgotten) line_.pop_front();
  for (const RowUnit& unit : reading.plan.units) stats_.bytes_asked += unit.size_bytes;
  stats_.bytes_moved += reading.moved_bytes;
  stats_.read_requests += static_cast<int64_t>(reading.plan.units.size());
  stats_.waiting_s += reading.waiting_s;
  stats_.computing_s += reading.computing_s;
}

// Rows are looked up by what the plan says, without a check for each: so the plan must lie within
// the queries.
static void check_fits(const RowRequest& request, const RowQueries& queries) {
  const RowGeometry& geometry = request.geometry;
  bool fits = geometry.d == queries.d && geometry.dv == queries.dv;
  for (const RowSegment& segment : request.segments) {
    if (segment.n_rows == 0 || segment.n_heads == 0) continue;
    const int64_t last_head = segment.first_head + (segment.n_heads - 1) * segment.head_step;
    fits = fits && segment.sequence < queries.n_sequences && segment.first_position >= 0;
    fits = fits && std::max(segment.first_head, last_head) < queries.n_heads && last_head >= 0;
    fits = fits && (queries.visible == nullptr ||
                    segment.first_position + segment.n_rows <= queries.visible_stride);
  }
  if (!fits)
    throw failure(io::Kind::invalid,
                  "the queries do not fit the rows: sequences, heads, widths, or positions");
}

void RowStream::attend(int64_t ticket, const RowQueries& queries, int n_threads,
                       const std::function<bool()>& interrupted) {
  const std::shared_ptr<Reading> reading = take_front(ticket);
  check_fits(reading->request, queries);
  const RowGeometry& geometry = reading->request.geometry;
  const auto n_units = static_cast<int64_t>(reading->plan.units.size());
  n_threads = static_cast<int>(std::clamp<int64_t>(n_threads, 1, std::max<int64_t>(1, n_units)));
  States states(queries, n_threads);
  const Arrived fold = [&](const Reading& reading, const RowUnit& unit, const char* memory,
                           int thread) {
    for (const RowPiece& piece : reading.plan.pieces(unit)) {
      attend_group(queries, piece.sequence, piece.head, rows_of(geometry, piece, memory),
                   states.of(thread, piece.sequence, piece.head));
    }
  };
  consume(*reading, n_threads, fold, interrupted);
  states.merge();
}

void RowStream::visit(int64_t ticket, const See& see, int n_threads,
                      const std::function<bool()>& interrupted) {
  const std::shared_ptr<Reading> reading = take_front(ticket);
  const auto n_units = static_cast<int64_t>(reading->plan.units.size());
  const Arrived show = [&](const Reading& reading, const RowUnit& unit, const char* memory,
                           int thread) {
    see(reading.plan, unit, memory, thread, [&] {
      if (thread == 0 && interrupted()) throw failure(io::Kind::cancelled, "interrupted");
      return reading.stopped.load();
    });
  };
  consume(*reading,
          static_cast<int>(std::clamp<int64_t>(n_threads, 1, std::max<int64_t>(1, n_units))), show,
          interrupted);
}

AttentionRows rows_of(const RowGeometry& geometry, const RowPiece& piece, const char* memory) {
  const auto* block = reinterpret_cast<const uint8_t*>(memory) + piece.offset_bytes;
  const uint8_t* k = block + geometry.k_offset_bytes;
  return {k,
          geometry.is_shared ? k : block + geometry.v_offset_bytes,
          piece.n_rows,
          geometry.block_rows,
          geometry.block_bytes,
          geometry.format,
          geometry.k_scale_offset_bytes - geometry.k_offset_bytes,
          geometry.v_scale_offset_bytes - geometry.k_offset_bytes,
          piece.first_position,
          nullptr};
}

void attend_group(const RowQueries& queries, int64_t sequence, int64_t head, AttentionRows rows,
                  const AttentionState& state, const PageSums* pages) {
  thread_local std::vector<int64_t> first_visible;
  const bool has_first = queries.first_visible != nullptr || queries.window > 0;
  if (has_first)
    first_visible.assign(queries.n,
                         queries.first_visible != nullptr ? queries.first_visible[sequence] : 0);
  for (int64_t i = 0; queries.window > 0 && i < queries.n; ++i) {
    first_visible[i] = std::max(first_visible[i], queries.position[i] - queries.window + 1);
  }
  if (queries.visible != nullptr) {
    rows.visible = queries.visible + sequence * queries.visible_stride + rows.first_position;
  }
  const int64_t before = (sequence * queries.n_heads + head) * queries.n;
  const AttentionQueries looking{
      queries.q + before * queries.d,
      queries.n,
      queries.d,
      queries.dv,
      queries.last_position,
      has_first ? first_visible.data() : nullptr,
      queries.soft_cap,
      queries.slopes != nullptr ? queries.slopes + head * queries.n : nullptr,
      queries.position};
  espnx::attend(looking, rows, state, pages);
}

}  // namespace espnx::device
