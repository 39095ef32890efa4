#include "buffer.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "file.hpp"

namespace espnx::io {
namespace {

constexpr int64_t kHugePageBytes = 2 << 20;
constexpr int64_t kLargestBytes = int64_t{1} << 47;  // the address space of a process

int64_t capacity_for(int64_t size_bytes) {
  // Quarter steps between powers of two: a pool of few sizes, at most a quarter wasted.
  int64_t step = 64 << 10;
  while (step * 8 < size_bytes) step *= 2;
  const int64_t capacity = (std::max<int64_t>(size_bytes, 1) + step - 1) / step * step;
  return capacity >= kHugePageBytes ? (capacity + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes : capacity;
}

Buffer* allocate(int64_t capacity_bytes) {
  // Huge pages: fewer faults, and a 1 MiB request stays one (virtio and NVMe drives limit the number of memory
  // segments).
  const bool huge = capacity_bytes >= kHugePageBytes;
  const int64_t extra = huge ? kHugePageBytes : 0;
  void* base = mmap(nullptr, capacity_bytes + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  char* data = static_cast<char*>(base);
  if (huge) {
    char* aligned =
        reinterpret_cast<char*>((reinterpret_cast<intptr_t>(data) + extra - 1) / kHugePageBytes * kHugePageBytes);
    if (aligned > data) munmap(data, aligned - data);
    if (data + extra > aligned) munmap(aligned + capacity_bytes, data + extra - aligned);
    data = aligned;
    madvise(data, capacity_bytes, MADV_HUGEPAGE);  // a hint; refused is fine
  }
  return new Buffer{data, capacity_bytes};
}

void release(Buffer* buffer) {
  munmap(buffer->data, buffer->capacity_bytes);
  delete buffer;
}

}  // namespace

BufferPool::~BufferPool() {
  for (auto& entry : free_) release(entry.second.release());
}

std::shared_ptr<Buffer> BufferPool::take(int64_t size_bytes) {
  if (size_bytes > kLargestBytes) throw std::bad_alloc();
  const int64_t capacity = capacity_for(size_bytes);
  Buffer* buffer = nullptr;
  std::vector<std::unique_ptr<Buffer>> unfit;
  {
    std::lock_guard lock(mutex_);
    const auto found = free_.lower_bound(capacity);
    if (found != free_.end() && found->first <= 2 * capacity) {
      buffer = found->second.release();
      free_.erase(found);
      free_bytes_ -= buffer->capacity_bytes;
    } else {
      // What is kept is of other sizes than are wanted now: as much of it goes as comes.
      for (int64_t gone = 0; gone < capacity && !free_.empty(); gone += unfit.back()->capacity_bytes) {
        unfit.push_back(std::move(free_.begin()->second));
        free_.erase(free_.begin());
        free_bytes_ -= unfit.back()->capacity_bytes;
        mapped_bytes_ -= unfit.back()->capacity_bytes;
      }
      mapped_bytes_ += capacity;
    }
  }
  for (auto& each : unfit) release(each.release());
  if (buffer == nullptr) {
    try {
      buffer = allocate(capacity);
    } catch (...) {
      std::lock_guard lock(mutex_);
      mapped_bytes_ -= capacity;
      throw;
    }
  }
  if (poison_) std::memset(buffer->data, 0xA5, buffer->capacity_bytes);
  return std::shared_ptr<Buffer>(buffer, [pool = weak_from_this()](Buffer* used) {
    if (auto alive = pool.lock()) {
      alive->give_back(used);
    } else {
      release(used);
    }
  });
}

void BufferPool::give_back(Buffer* buffer) {
  {
    std::lock_guard lock(mutex_);
    if (free_bytes_ + buffer->capacity_bytes <= keep_bytes_) {
      free_bytes_ += buffer->capacity_bytes;
      free_.emplace(buffer->capacity_bytes, std::unique_ptr<Buffer>(buffer));
      return;
    }
    mapped_bytes_ -= buffer->capacity_bytes;
  }
  release(buffer);
}

int64_t BufferPool::mapped_bytes() {
  std::lock_guard lock(mutex_);
  return mapped_bytes_;
}

}  // namespace espnx::io
