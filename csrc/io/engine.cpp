#include "engine.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace espnx::io {
namespace {

constexpr int64_t kLongestWaitNs =
    1'000'000'000;  // a wake-up that is lost costs this, and is no hang

Failure make_failure(Kind kind, int error, std::string what) {
  Failure failure;
  failure.kind = kind;
  failure.error = error;
  failure.what = std::move(what);
  return failure;
}

// Memory that a device may still write to after the engine is gone. Reachable forever, on purpose.
void abandon(std::shared_ptr<Transfer> transfer) {
  static std::mutex mutex;  // engines may close at the same time
  static auto* transfers = new std::vector<std::shared_ptr<Transfer>>();
  std::lock_guard lock(mutex);
  transfers->push_back(std::move(transfer));
}

constexpr int64_t kFilesPerEngine = int64_t{1} << 32;

}  // namespace

int64_t reserve_file_numbers() {
  static std::atomic<int64_t> engines{0};
  return engines++ * kFilesPerEngine;
}

Engine::Engine(EngineOptions options)
    : options_(std::move(options)),
      pool_(std::make_shared<BufferPool>(options_.pool_bytes, options_.poison)),
      faults_(std::make_shared<FaultState>(options_.rules, options_.seed)),
      process_(getpid()),
      first_file_(reserve_file_numbers()) {
  if (options_.queue_depth < 1 || options_.queue_depth > 4096 || options_.threads < 1 ||
      options_.threads > 1024) {
    throw FailureError(
        make_failure(Kind::invalid, 0, "queue_depth must be 1 to 4096 and threads 1 to 1024"));
  }
  if (options_.request_bytes < kBlockBytes || options_.request_bytes % kBlockBytes != 0 ||
      options_.request_bytes > (1 << 30)) {
    throw FailureError(
        make_failure(Kind::invalid, 0, "request_bytes must be a multiple of 4096, at most 1 GiB"));
  }
  slots_.resize(options_.queue_depth);
  for (uint64_t i = options_.queue_depth; i-- > 0;) free_slots_.push_back(i);
  std::exception_ptr failed;
  thread_ = std::thread([this, &failed] {
    try {
      // In its own thread: a single-issuer ring belongs to the thread that made it.
      auto queue = make_queue();
      std::lock_guard lock(mutex_);
      queue_ = std::move(queue);
    } catch (...) {
      failed = std::current_exception();
    }
    const bool broken = failed != nullptr;
    {
      std::lock_guard lock(mutex_);
      up_ = true;
      state_changed_.notify_all();
    }
    if (!broken) run();
  });
  {
    std::unique_lock lock(mutex_);
    state_changed_.wait(lock, [this] { return up_; });
  }
  if (failed) {
    thread_.join();
    std::rethrow_exception(failed);
  }
}

Engine::~Engine() { close(5.0); }

std::unique_ptr<Queue> Engine::make_queue() {
  auto queue = io::make_queue(options_.path, options_.queue_depth, options_.threads, effective_,
                              fallback_reason_);
  return options_.rules.empty() ? std::move(queue) : make_faulty_queue(std::move(queue), faults_);
}

std::unique_ptr<Queue> Engine::thread_queue(unsigned depth) {
  check_open("queue");
  std::string effective, reason;
  auto queue = io::make_queue(effective_, depth, std::min(options_.threads, 4u), effective, reason);
  return options_.rules.empty() ? std::move(queue) : make_faulty_queue(std::move(queue), faults_);
}

bool Engine::in_own_process() const { return process_ == getpid(); }

void Engine::check_process(const std::string& what) const {
  if (in_own_process()) return;
  throw FailureError(
      make_failure(Kind::invalid, 0,
                   what + ": the engine belongs to the parent process; open one after fork()"));
}

void Engine::check_open(const std::string& what) const {
  check_process(what);
  if (stopping_) throw FailureError(make_failure(Kind::closed, 0, what + ": the engine is closed"));
}

size_t Engine::index_of(int64_t number) const {
  if (number >= first_file_ && number - first_file_ < kFilesPerEngine)
    return static_cast<size_t>(number - first_file_);
  throw FailureError(make_failure(
      Kind::invalid, 0, "file " + std::to_string(number) + " is not open in this engine"));
}

void Engine::before(const char* operation, const std::string& path) {
  check_open(operation);
  const FaultRule* rule = options_.rules.empty() ? nullptr : faults_->hit(operation, path, 0, 0);
  if (rule == nullptr) return;
  if (rule->fault == Fault::delay) usleep(static_cast<useconds_t>(rule->value / 1000));
  if (rule->fault != Fault::error) return;
  const auto error = static_cast<int>(rule->value);
  const bool full = error == ENOSPC || error == EDQUOT;
  Failure failure =
      make_failure(full ? Kind::disk_full : Kind::write, error, std::string(operation) + " failed");
  if (std::strcmp(operation, "open_read") == 0) failure.kind = Kind::read;
  failure.path = path;
  if (failure.kind == Kind::disk_full) failure.free_bytes = free_bytes(path);
  throw FailureError(failure);
}

int64_t Engine::open(const std::string& path, Mode mode, Direct direct) {
  before(mode == Mode::read ? "open_read" : "open_write", path);
  if (effective_ == "memory" && direct == Direct::yes) {
    throw FailureError(make_failure(Kind::unavailable, 0, "path 'memory' has no O_DIRECT"));
  }
  auto file = effective_ == "memory" ? open_memory_file(path, mode) : open_file(path, mode, direct);
  std::lock_guard lock(mutex_);
  files_.push_back(std::move(file));
  return first_file_ + static_cast<int64_t>(files_.size()) - 1;
}

std::shared_ptr<File> Engine::file(int64_t number) {
  check_open("file");
  const size_t index = index_of(number);
  std::lock_guard lock(mutex_);
  if (index >= files_.size() || !files_[index]) {
    throw FailureError(make_failure(
        Kind::invalid, 0, "file " + std::to_string(number) + " is not open in this engine"));
  }
  return files_[index];
}

void Engine::close_file(int64_t number) {
  file(number);
  std::lock_guard lock(mutex_);
  files_[index_of(number)].reset();  // transfers under way hold it open
}

bool Engine::allocate(int64_t number, int64_t size_bytes) {
  auto target = file(number);
  before("allocate", target->path);
  return allocate_file(*target, size_bytes);
}

void Engine::truncate(int64_t number, int64_t size_bytes) {
  auto target = file(number);
  before("truncate", target->path);
  truncate_file(*target, size_bytes);
}

void Engine::sync(int64_t number) {
  auto target = file(number);
  before("sync", target->path);
  sync_file(*target);
}

void Engine::sync_directory(const std::string& path) {
  before("sync_directory", path);
  io::sync_directory(path);
}

std::shared_ptr<Transfer> Engine::submit(TransferSpec spec) {
  check_open(spec.reading ? "read" : "write");
  Files files;  // only those of the plan: a transfer keeps its files open
  {
    std::lock_guard lock(mutex_);
    if (stopping_)
      throw FailureError(make_failure(Kind::closed, 0, "the engine was closed during the call"));
    files.resize(files_.size());
    for (int64_t& file : spec.file) {
      const size_t index = index_of(file);
      if (index < files.size() && !files[index]) files[index] = files_[index];
      file = static_cast<int64_t>(index);
    }
  }
  auto transfer =
      std::make_shared<Transfer>(std::move(spec), std::move(files), pool_, options_.request_bytes);
  transfer->on_fail = [this, weak = std::weak_ptr<Transfer>(transfer)] {
    if (weak.expired()) return;
    ++failures_;
    cancel_wanted_ = true;
    std::lock_guard lock(mutex_);
    if (queue_) queue_->wake();
  };
  bytes_asked_ += transfer->asked_bytes();
  std::lock_guard lock(mutex_);
  // Under the lock: what is in the list when the I/O thread stops is failed by it, and nothing
  // comes in afterwards.
  if (stopping_ || !queue_)
    throw FailureError(make_failure(Kind::closed, 0, "the engine was closed during the call"));
  auto at = std::find_if(active_.begin(), active_.end(), [&](const auto& other) {
    return other->priority() < transfer->priority();
  });
  active_.insert(at, transfer);
  queue_->wake();
  return transfer;
}

EngineStats Engine::stats() {
  check_process("stats");
  EngineStats stats;
  stats.bytes_asked = bytes_asked_;
  stats.bytes_moved = bytes_moved_;
  stats.requests = requests_;
  stats.retries = retries_;
  stats.failures = failures_;
  stats.in_flight = in_flight_;
  stats.fault_hits = faults_->hits();
  std::lock_guard lock(mutex_);
  stats.quarantined_buffers = abandoned_buffers_;
  stats.quarantined_bytes = abandoned_bytes_;
  for (const auto& transfer : active_) {
    if (!transfer->failed() || transfer->in_flight() == 0) continue;
    ++stats.quarantined_buffers;
    stats.quarantined_bytes += transfer->held_bytes();
  }
  return stats;
}

void Engine::close(double grace_s) {
  if (!in_own_process()) return forget();
  {
    std::unique_lock lock(mutex_);
    if (closing_) return state_changed_.wait(lock, [this] { return closed_; });
    closing_ = true;
    grace_s_ = grace_s > 0 ? std::min(grace_s, 1e9) : 0;
    stopping_ = true;
    if (queue_) queue_->wake();
  }
  thread_.join();
  std::lock_guard lock(mutex_);
  files_.clear();
  closed_ = true;
  state_changed_.notify_all();
}

// After fork(), in the child: a lock may be held and a condition variable slept on by threads that
// are not here, so that locking the one or destroying the other would wait forever. What contains
// them is left where it is.
void Engine::forget() {
  stopping_ = true;
  if (!thread_.joinable()) return;
  [[maybe_unused]] auto* thread = new std::thread(std::move(thread_));
  [[maybe_unused]] auto* queue = queue_.release();
  [[maybe_unused]] auto* active = new std::list<std::shared_ptr<Transfer>>(std::move(active_));
  [[maybe_unused]] auto* slots = new std::vector<Slot>(std::move(slots_));
  [[maybe_unused]] auto* touched = new std::vector<std::shared_ptr<Transfer>>(std::move(touched_));
}

void Engine::run() {
  std::vector<Completion> completions;
  try {
    while (!stopping_) {
      completions.clear();
      queue_->wait(completions, 1,
                   kLongestWaitNs);  // whatever has come; under load that is many at a time,
                                     // without waiting for it
      for (const Completion& completion : completions) complete(completion);
      // Before anybody is told: what has ended leaves the list, so that its memory is the caller's
      // alone, and is free when the caller asks for the next.
      admit();
      if (cancel_wanted_.exchange(false)) send_cancels();
      notify_touched();
    }
  } catch (const FailureError& error) {
    fail_everything(error.failure);
  } catch (const std::exception& error) {
    fail_everything(make_failure(
        Kind::closed, 0, std::string("the storage engine's thread ended: ") + error.what()));
  }
  drain();
}

void Engine::notify_touched() {
  std::sort(touched_.begin(), touched_.end());
  touched_.erase(std::unique(touched_.begin(), touched_.end()), touched_.end());
  for (auto& transfer : touched_) std::exchange(transfer, nullptr)->notify();
  touched_.clear();
}

void Engine::admit() {
  std::lock_guard lock(mutex_);
  for (auto it = active_.begin(); it != active_.end();) {
    Transfer& transfer = **it;
    while (!free_slots_.empty()) {
      const uint64_t tag = free_slots_.back();
      Slot& slot = slots_[tag];
      if (!transfer.take_piece(slot.piece, slot.extent)) break;
      free_slots_.pop_back();
      slot.transfer = *it;
      slot.cancel_sent = false;
      transfer.piece_started();
      ++in_flight_;
      ++requests_;
      queue_->submit(slot.piece.request(tag));
    }
    if (free_slots_.empty() && transfer.has_pieces()) return;
    if (!transfer.has_pieces() && transfer.in_flight() == 0) {
      it = active_.erase(it);
    } else {
      ++it;
    }
  }
}

void Engine::send_cancels() {
  for (uint64_t tag = 0; tag < slots_.size(); ++tag) {
    Slot& slot = slots_[tag];
    if (!slot.transfer || slot.cancel_sent || !(stopping_ || slot.transfer->failed())) continue;
    slot.cancel_sent = true;
    queue_->cancel(tag);
  }
}

void Engine::end(uint64_t tag, bool whole) {
  Slot& slot = slots_[tag];
  slot.transfer->piece_ended(slot.extent, whole);
  touched_.push_back(std::move(slot.transfer));
  free_slots_.push_back(tag);
  --in_flight_;
}

void Engine::complete(const Completion& completion) {
  const uint64_t tag = completion.tag;
  Slot& slot = slots_[tag];
  Transfer& transfer = *slot.transfer;
  Progress progress = advance(slot.piece, completion.result);
  if (completion.result > 0) bytes_moved_ += completion.result;
  transfer.piece_moved(progress.moved_bytes);
  if (progress.step == Step::done) return end(tag, true);
  if (transfer.failed()) return end(tag, false);
  if (progress.step == Step::again) {
    ++retries_;
    return queue_->submit(slot.piece.request(tag));
  }
  Failure& failure = progress.failure;
  const bool is_short = failure.error == 0;
  if (failure.kind == Kind::disk_full) {
    failure.what = "no space left";
    failure.needed_bytes = transfer.missing_bytes();
    failure.free_bytes = free_bytes(failure.path);
  } else if (failure.kind == Kind::truncated) {
    failure.what = "file ended during the read";
  } else {
    failure.what = std::string(transfer.reading() ? "read" : "write") +
                   (is_short ? " stays short" : " failed");
  }
  transfer.fail(std::move(failure));
  end(tag, false);
}

void Engine::fail_everything(const Failure& failure) {
  std::list<std::shared_ptr<Transfer>> all;
  {
    std::lock_guard lock(mutex_);
    all = active_;
  }
  for (const auto& transfer : all) transfer->fail(failure);
}

void Engine::drain() {
  double grace_s;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    grace_s = grace_s_;
  }
  fail_everything(make_failure(Kind::closed, 0, "the engine was closed during the call"));
  const auto until = Clock::now() + std::chrono::nanoseconds(static_cast<int64_t>(grace_s * 1e9));
  std::vector<Completion> completions;
  try {
    send_cancels();
    while (in_flight_ > 0 && Clock::now() < until) {
      completions.clear();
      queue_->wait(completions, 1, 10'000'000);
      for (const Completion& completion : completions) end(completion.tag, false);
    }
  } catch (const std::exception&) {
    // The queue is broken: nothing more will complete. What is left is abandoned.
  }
  notify_touched();
  abandon_what_is_left();
}

void Engine::abandon_what_is_left() {
  std::lock_guard lock(mutex_);
  for (const auto& transfer : active_) {
    if (transfer->in_flight() == 0) continue;
    ++abandoned_buffers_;
    abandoned_bytes_ += transfer->held_bytes();
    abandon(transfer);
  }
  for (Slot& slot : slots_) slot.transfer.reset();
  active_.clear();
  queue_.reset();
}

}  // namespace espnx::io
