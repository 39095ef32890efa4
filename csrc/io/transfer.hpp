// One submitted plan: what the I/O thread works through and what a future in Python waits for.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "buffer.hpp"
#include "failure.hpp"
#include "layout.hpp"
#include "piece.hpp"

namespace espnx::io {

using Clock = std::chrono::steady_clock;

struct TransferSpec {
  bool reading = true;
  std::vector<int64_t> file, offset_bytes, size_bytes;
  std::vector<int64_t> out_offset_bytes;  // empty: the engine packs the items
  std::vector<int64_t> crc32c;            // empty: not checked
  char* base = nullptr;                   // the caller's memory; null: the engine takes a buffer
  int64_t base_bytes = 0;
  std::shared_ptr<void> keep_alive;  // owns `base`
  int64_t gap_bytes = 0;
  int priority = 0;
  double deadline_s = 30;

  Items items() const {
    return {static_cast<int64_t>(file.size()), file.data(), offset_bytes.data(), size_bytes.data()};
  }
};

class Transfer {
 public:
  Transfer(TransferSpec spec, Files files, const std::shared_ptr<BufferPool>& pool,
           int64_t limit_bytes);

  // --- the caller's side; any thread ---

  // Waits up to `wait_ns` for `at_least` items more than were handed out so far (or the end),
  // checks and copies them in this thread, and appends their numbers. True once every item has been
  // handed out. Throws FailureError: the first failure, the deadline.
  bool next(std::vector<int64_t>& items, int64_t at_least, int64_t wait_ns);

  // Ends the transfer with `failure` unless it has ended. What is already with the device keeps its
  // memory until it completes.
  void fail(Failure failure);

  // Gives the engine's memory back at once, whoever else still holds this transfer. For what has
  // arrived whole, and been used.
  void release_memory();

  const std::vector<int64_t>& position_bytes() const { return position_bytes_; }
  char* memory() const { return copies_ ? spec_.base : memory_; }
  int64_t memory_bytes() const { return copies_ ? spec_.base_bytes : memory_bytes_; }
  std::shared_ptr<void> memory_owner() const {
    return spec_.base != nullptr ? spec_.keep_alive : std::shared_ptr<void>(buffer_);
  }
  int64_t asked_bytes() const { return layout_.asked_bytes; }
  int64_t moved_bytes() const { return moved_bytes_; }
  int64_t request_count() const { return requests_; }
  bool failed() const { return failed_; }
  bool finished();

  // --- the I/O thread's side ---

  // The next piece to submit, at most the engine's request limit long, and the extent that it is
  // of. False at the end or after a failure.
  bool take_piece(Piece& piece, size_t& extent);
  bool has_pieces() const { return !failed_ && next_extent_ < layout_.extents.size(); }
  void piece_started() { ++in_flight_, ++requests_; }
  void piece_moved(int64_t bytes) { moved_bytes_ += bytes; }
  void piece_ended(size_t extent, bool whole);
  void notify();

  bool reading() const { return spec_.reading; }
  int priority() const { return spec_.priority; }
  int64_t in_flight() const { return in_flight_; }
  int64_t missing_bytes() const { return layout_.asked_bytes - moved_bytes_; }
  int64_t held_bytes() const { return buffer_ ? buffer_->capacity_bytes : memory_bytes_; }

  std::function<void()> on_fail;  // tells the engine to drop and cancel what is left

 private:
  bool nothing_to_come() const;  // under mutex_
  void place_items(const std::shared_ptr<BufferPool>& pool, int64_t limit_bytes);
  void deliver(size_t extent, std::vector<int64_t>& items);
  Failure deadline_failure() const;

  TransferSpec spec_;
  Files files_;
  int64_t limit_bytes_;
  Layout layout_;
  std::vector<int64_t> position_bytes_;  // as the caller sees them
  std::shared_ptr<Buffer> buffer_;
  char* memory_ = nullptr;
  int64_t memory_bytes_ = 0;
  bool copies_ =
      false;  // through the buffer, because the caller's memory or offsets are not aligned
  Clock::time_point deadline_;

  size_t next_extent_ = 0;  // I/O thread only
  int64_t next_piece_bytes_ = 0;
  std::atomic<int64_t> in_flight_{0}, moved_bytes_{0}, requests_{0};
  std::atomic<bool> failed_{false};

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int64_t> open_pieces_;  // per extent
  std::vector<size_t> ready_;
  int64_t ready_items_ = 0;
  int64_t wanted_items_ = 0;
  int64_t handed_out_ = 0;
  int delivering_ = 0;  // threads in deliver(): what they have taken is handed out, but not yet
                        // checked and copied
  std::vector<int64_t> empty_items_;
  std::optional<Failure> failure_;
};

}  // namespace espnx::io
