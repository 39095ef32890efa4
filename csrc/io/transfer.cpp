#include "transfer.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "cpu/crc32c.hpp"

namespace espnx::io {
namespace {

std::string hex(uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof text, "%08x", value);
  return text;
}

void check_out_range(const TransferSpec& spec) {
  for (size_t i = 0; i < spec.out_offset_bytes.size(); ++i) {
    const int64_t to = spec.out_offset_bytes[i], size = spec.size_bytes[i];
    if (to >= 0 && to <= spec.base_bytes && size <= spec.base_bytes - to) continue;
    Failure failure;
    failure.kind = Kind::invalid;
    failure.what =
        "descriptor " + std::to_string(i) + " of the plan does not fit the caller's memory";
    failure.got = std::to_string(size) + " bytes at " + std::to_string(to);
    failure.expected = "a range inside " + std::to_string(spec.base_bytes) + " bytes";
    throw FailureError(failure);
  }
}

void check_checksums(const TransferSpec& spec) {
  for (size_t i = 0; i < spec.crc32c.size(); ++i) {
    if (spec.crc32c[i] >= 0 && spec.crc32c[i] <= UINT32_MAX) continue;
    Failure failure;
    failure.kind = Kind::invalid;
    failure.what =
        "descriptor " + std::to_string(i) + " of the plan: its crc32c is not a 32-bit number";
    failure.got = std::to_string(spec.crc32c[i]);
    throw FailureError(failure);
  }
}

}  // namespace

Transfer::Transfer(TransferSpec spec, Files files, const std::shared_ptr<BufferPool>& pool,
                   int64_t limit_bytes)
    : spec_(std::move(spec)), files_(std::move(files)), limit_bytes_(limit_bytes) {
  check_items(spec_.items(), files_, spec_.reading);
  check_out_range(spec_);
  check_checksums(spec_);
  place_items(pool, limit_bytes);
  open_pieces_.reserve(layout_.extents.size());
  for (const Extent& extent : layout_.extents)
    open_pieces_.push_back((extent.expected_bytes + limit_bytes - 1) / limit_bytes);
  for (size_t i = 0; i < spec_.size_bytes.size(); ++i) {
    if (spec_.size_bytes[i] == 0) empty_items_.push_back(static_cast<int64_t>(i));
  }
  const double bounded_s = std::min(spec_.deadline_s, 1e9);
  deadline_ = Clock::now() + std::chrono::nanoseconds(static_cast<int64_t>(bounded_s * 1e9));
}

void Transfer::place_items(const std::shared_ptr<BufferPool>& pool, int64_t limit_bytes) {
  const Items items = spec_.items();
  if (!spec_.out_offset_bytes.empty() || (spec_.base != nullptr && items.count == 0)) {
    if (place(items, files_, spec_.out_offset_bytes.data(), spec_.base, spec_.reading, limit_bytes,
              layout_)) {
      position_bytes_ = layout_.position_bytes;
      memory_ = spec_.base;
      memory_bytes_ = spec_.base_bytes;
      return;
    }
    if (!spec_.reading) {
      Failure failure;
      failure.kind = Kind::invalid;
      failure.what =
          "a write with O_DIRECT needs offsets, sizes and memory that are multiples of " +
          std::to_string(kBlockBytes);
      throw FailureError(failure);
    }
  }
  layout_ = pack(items, files_, spec_.gap_bytes, limit_bytes);
  buffer_ = pool->take(layout_.memory_bytes);
  memory_ = buffer_->data;
  memory_bytes_ = layout_.memory_bytes;
  copies_ = !spec_.out_offset_bytes.empty();
  position_bytes_ = layout_.position_bytes;
  for (size_t i = 0; copies_ && i < position_bytes_.size(); ++i) {
    if (spec_.size_bytes[i] > 0) position_bytes_[i] = spec_.out_offset_bytes[i];
  }
}

bool Transfer::take_piece(Piece& piece, size_t& extent_number) {
  while (has_pieces()) {
    const Extent& extent = layout_.extents[next_extent_];
    const int64_t done = next_piece_bytes_;
    if (done >= extent.expected_bytes) {
      ++next_extent_;
      next_piece_bytes_ = 0;
      continue;
    }
    extent_number = next_extent_;
    piece.op = spec_.reading ? Op::read : Op::write;
    piece.file = files_[extent.file].get();
    piece.offset_bytes = extent.offset_bytes + done;
    piece.data = memory_ + extent.place_bytes + done;
    piece.size_bytes = std::min(limit_bytes_, extent.size_bytes - done);
    piece.expected_bytes = std::min(piece.size_bytes, extent.expected_bytes - done);
    piece.idle_retries = 0;
    next_piece_bytes_ += piece.size_bytes;
    if (next_piece_bytes_ >= extent.expected_bytes) {
      ++next_extent_;
      next_piece_bytes_ = 0;
    }
    return true;
  }
  return false;
}

void Transfer::piece_ended(size_t extent, bool whole) {
  --in_flight_;
  if (!whole) return;
  std::lock_guard lock(mutex_);
  if (--open_pieces_[extent] > 0) return;
  ready_.push_back(extent);
  ready_items_ += layout_.extents[extent].last - layout_.extents[extent].first;
}

void Transfer::release_memory() {
  std::lock_guard lock(mutex_);
  if (in_flight_ == 0) buffer_.reset();
}

void Transfer::notify() {
  std::lock_guard lock(mutex_);
  const auto all = static_cast<int64_t>(spec_.file.size());
  if (failure_ || ready_items_ >= wanted_items_ ||
      handed_out_ + ready_items_ + static_cast<int64_t>(empty_items_.size()) >= all) {
    changed_.notify_all();
  }
}

void Transfer::fail(Failure failure) {
  {
    std::lock_guard lock(mutex_);
    if (failure_ || handed_out_ == static_cast<int64_t>(spec_.file.size())) return;
    failure_ = std::move(failure);
    failed_ = true;
    changed_.notify_all();
  }
  if (on_fail) on_fail();
}

bool Transfer::finished() {
  std::lock_guard lock(mutex_);
  return failure_ || handed_out_ + ready_items_ + static_cast<int64_t>(empty_items_.size()) ==
                         static_cast<int64_t>(spec_.file.size());
}

bool Transfer::nothing_to_come() const {
  return handed_out_ == static_cast<int64_t>(spec_.file.size()) && delivering_ == 0;
}

bool Transfer::next(std::vector<int64_t>& items, int64_t at_least, int64_t wait_ns) {
  const auto all = static_cast<int64_t>(spec_.file.size());
  const Clock::time_point until =
      std::min(deadline_, Clock::now() + std::chrono::nanoseconds(wait_ns));
  std::vector<size_t> extents;
  {
    std::unique_lock lock(mutex_);
    const auto there = [&] { return ready_items_ + static_cast<int64_t>(empty_items_.size()); };
    wanted_items_ = std::max<int64_t>(1, at_least - static_cast<int64_t>(empty_items_.size()));
    // Another thread may have taken the last items: this one returns when they are checked and
    // copied, or fails with them.
    const auto last_here = [&] { return there() > 0 && handed_out_ + there() == all; };
    changed_.wait_until(lock, until, [&] {
      return failure_ || there() >= at_least || last_here() || nothing_to_come();
    });
    if (failure_) throw FailureError(*failure_);
    if (there() < at_least && !last_here() && !nothing_to_come()) {
      if (Clock::now() < deadline_) return false;
      Failure failure = deadline_failure();
      lock.unlock();
      fail(failure);
      throw FailureError(failure);
    }
    extents.swap(ready_);
    items.insert(items.end(), empty_items_.begin(), empty_items_.end());
    handed_out_ += there();
    empty_items_.clear();
    ready_items_ = 0;
    ++delivering_;
  }
  // Outside the lock, in the caller's thread: the I/O thread goes on feeding the device meanwhile.
  try {
    for (size_t extent : extents) deliver(extent, items);
  } catch (...) {
    std::lock_guard lock(mutex_);
    --delivering_;
    throw;
  }
  std::lock_guard lock(mutex_);
  if (--delivering_ == 0) changed_.notify_all();
  if (failure_) throw FailureError(*failure_);
  return nothing_to_come();
}

void Transfer::deliver(size_t extent_number, std::vector<int64_t>& items) {
  const Extent& extent = layout_.extents[extent_number];
  for (int64_t at = extent.first; at < extent.last; ++at) {
    const int64_t i = layout_.order[at];
    const char* data = memory_ + layout_.position_bytes[i];
    if (spec_.reading && !spec_.crc32c.empty()) {
      const uint32_t found = espnx::crc32c(0, data, spec_.size_bytes[i]);
      if (found != static_cast<uint32_t>(spec_.crc32c[i])) {
        Failure failure;
        failure.kind = Kind::checksum;
        failure.what = "bytes read are not the bytes written";
        failure.path = files_[spec_.file[i]]->path;
        failure.offset_bytes = spec_.offset_bytes[i];
        failure.size_bytes = spec_.size_bytes[i];
        failure.got = "CRC32C " + hex(found);
        failure.expected = "CRC32C " + hex(static_cast<uint32_t>(spec_.crc32c[i]));
        {
          std::lock_guard lock(mutex_);
          handed_out_ -= 1;  // so that fail() does not take the transfer for finished
        }
        fail(failure);
        throw FailureError(failure);
      }
    }
    if (copies_) std::memcpy(spec_.base + spec_.out_offset_bytes[i], data, spec_.size_bytes[i]);
    items.push_back(i);
  }
}

Failure Transfer::deadline_failure() const {
  Failure failure;
  failure.kind = Kind::deadline;
  failure.what = spec_.reading ? "read did not complete in time" : "write did not complete in time";
  int64_t open = 0;
  for (size_t i = 0; i < layout_.extents.size(); ++i) {
    if (open_pieces_[i] == 0) continue;
    if (open++ > 0) continue;
    failure.path = files_[layout_.extents[i].file]->path;
    failure.offset_bytes = layout_.extents[i].offset_bytes;
    failure.size_bytes = layout_.extents[i].size_bytes;
  }
  failure.got = std::to_string(open) + " of " + std::to_string(layout_.extents.size()) +
                " requests outstanding";
  failure.expected = "completion within " + std::to_string(spec_.deadline_s) + " s";
  return failure;
}

}  // namespace espnx::io
