// Page-aligned memory for I/O, mapped and recycled: a fresh 8 MiB buffer costs two thousand page
// faults, about as long as the reads into it; from the allocator's heap it would leave holes that
// whatever is small and stays keeps apart.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace espnx::io {

class BufferPool;

struct Buffer {
  char* data = nullptr;
  int64_t capacity_bytes = 0;
};

class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  // Keeps at most `keep_bytes` of unused memory. `poison`: fills what it hands out with 0xA5, so
  // that tests see bytes nobody wrote.
  BufferPool(int64_t keep_bytes, bool poison) : keep_bytes_(keep_bytes), poison_(poison) {}
  ~BufferPool();

  // Throws std::bad_alloc. The memory returns to the pool when the last reference goes, from any
  // thread, also after the pool is gone.
  std::shared_ptr<Buffer> take(int64_t size_bytes);

  // Keeps so many bytes of unused memory more than it would, or less where the number is negative.
  // Any thread.
  void keep(int64_t more_bytes);

  // Mapped now: handed out or kept. It exceeds what was handed out at one time by what is kept at
  // most.
  int64_t mapped_bytes();

 private:
  Buffer* cut(int64_t capacity_bytes,
              int64_t whole_bytes);  // the first part of new huge pages; the others are kept
  void give_back(Buffer* buffer);

  std::mutex mutex_;
  std::multimap<int64_t, std::unique_ptr<Buffer>> free_;
  int64_t free_bytes_ = 0, mapped_bytes_ = 0;
  int64_t keep_bytes_;
  bool poison_;
};

}  // namespace espnx::io
