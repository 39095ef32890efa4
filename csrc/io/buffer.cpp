#include "buffer.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "file.hpp"

namespace espnx::io {
namespace {

constexpr int64_t kPageBytes = 4096, kHugePageBytes = 2 << 20;
constexpr int64_t kCutBytes = 256 << 10;  // buffers from here on are parts of a huge page
constexpr int64_t kLargestBytes = int64_t{1} << 47;  // the address space of a process

int64_t rounded_up(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

// How large a buffer is, and how much is mapped to cut it from.
struct Fit {
  int64_t capacity_bytes, mapped_bytes;
};

// At most a quarter is wasted. Parts of up to four huge pages come that near to any size, parts of
// one do not: 700 KiB fit only twice into 2 MiB, but five times into 4.
Fit fit_for(int64_t size_bytes) {
  if (kCutBytes <= size_bytes && size_bytes <= kHugePageBytes) {
    const int64_t wanted = rounded_up(size_bytes, kPageBytes);
    for (int64_t mapped = kHugePageBytes;; mapped += kHugePageBytes) {
      const int64_t capacity = mapped / (mapped / wanted) / kPageBytes * kPageBytes;
      if (capacity <= wanted + wanted / 4) return {capacity, mapped};
    }
  }
  // Quarter steps between powers of two: a pool of few sizes.
  int64_t step = 64 << 10;
  while (step * 8 < size_bytes) step *= 2;
  const int64_t capacity = rounded_up(std::max<int64_t>(size_bytes, 1), step);
  const int64_t whole = capacity > kHugePageBytes ? rounded_up(capacity, kHugePageBytes) : capacity;
  return {whole, whole};
}

// Huge pages: fewer faults, and memory that lies together. A drive takes a request in as many parts
// as its memory lies in; 960 KiB in 240 scattered pages took a virtual disk 1.6 times as long as
// the same in one part.
char* map_pages(int64_t size_bytes) {
  const bool huge = size_bytes >= kHugePageBytes && size_bytes % kHugePageBytes == 0;
  const int64_t extra = huge ? kHugePageBytes : 0;
  void* base =
      mmap(nullptr, size_bytes + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  char* data = static_cast<char*>(base);
  if (huge) {
    char* aligned =
        reinterpret_cast<char*>(rounded_up(reinterpret_cast<intptr_t>(data), kHugePageBytes));
    if (aligned > data) munmap(data, aligned - data);
    if (data + extra > aligned) munmap(aligned + size_bytes, data + extra - aligned);
    data = aligned;
    madvise(data, size_bytes, MADV_HUGEPAGE);  // a hint; refused is fine
  }
  return data;
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
  const auto [capacity, mapped] = fit_for(size_bytes);
  Buffer* buffer = nullptr;
  std::vector<std::unique_ptr<Buffer>> unfit;
  bool is_roomy = false;
  {
    std::lock_guard lock(mutex_);
    const auto found = free_.lower_bound(capacity);
    if (found != free_.end() && found->first <= 2 * capacity) {
      buffer = found->second.release();
      free_.erase(found);
      free_bytes_ -= buffer->capacity_bytes;
    } else {
      // What is kept is of other sizes than are wanted now: as much of it goes as comes.
      for (int64_t gone = 0; gone < capacity && !free_.empty();
           gone += unfit.back()->capacity_bytes) {
        unfit.push_back(std::move(free_.begin()->second));
        free_.erase(free_.begin());
        free_bytes_ -= unfit.back()->capacity_bytes;
        mapped_bytes_ -= unfit.back()->capacity_bytes;
      }
      mapped_bytes_ += capacity;
      is_roomy = free_bytes_ + mapped - capacity <= keep_bytes_;
    }
  }
  for (auto& each : unfit) release(each.release());
  if (buffer == nullptr) {
    try {
      if (capacity < mapped && is_roomy) buffer = cut(capacity, mapped);
      if (buffer == nullptr) buffer = new Buffer{map_pages(capacity), capacity};
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

// Each part is unmapped by itself, whenever it goes. The last has what is left of the pages: cut
// off, they would be no huge pages any more. Null where the address space has no room for them: one
// part alone may have.
Buffer* BufferPool::cut(int64_t capacity_bytes, int64_t whole_bytes) {
  char* pages = nullptr;
  try {
    pages = map_pages(whole_bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
  const int64_t parts = whole_bytes / capacity_bytes;
  for (int64_t part = 1; part < parts; ++part) {
    const int64_t begin = part * capacity_bytes,
                  end = part + 1 < parts ? begin + capacity_bytes : whole_bytes;
    {
      std::lock_guard lock(mutex_);
      mapped_bytes_ += end - begin;
    }
    give_back(new Buffer{pages + begin, end - begin});
  }
  return new Buffer{pages, capacity_bytes};
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

void BufferPool::keep(int64_t more_bytes) {
  std::vector<std::unique_ptr<Buffer>> surplus;
  {
    std::lock_guard lock(mutex_);
    keep_bytes_ += more_bytes;
    while (free_bytes_ > keep_bytes_ && !free_.empty()) {
      surplus.push_back(std::move(free_.begin()->second));
      free_.erase(free_.begin());
      free_bytes_ -= surplus.back()->capacity_bytes;
      mapped_bytes_ -= surplus.back()->capacity_bytes;
    }
  }
  for (auto& each : surplus) release(each.release());
}

int64_t BufferPool::mapped_bytes() {
  std::lock_guard lock(mutex_);
  return mapped_bytes_;
}

}  // namespace espnx::io
