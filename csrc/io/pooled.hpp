// Vectors in a pool's memory: large ones come and go in whole mappings. From the allocator's heap
// they would leave holes, and what is small and stays would settle in them.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <unordered_map>
#include <vector>

#include "buffer.hpp"

namespace espnx::io {

// An allocator. What is smaller than a mapping of the pool lies on the heap like everything small.
template <typename T>
class Pooled {
 public:
  using value_type = T;
  using propagate_on_container_move_assignment = std::true_type;
  using propagate_on_container_swap = std::true_type;

  Pooled(std::shared_ptr<BufferPool> pool)
      : pool_(std::move(pool)) {}  // NOLINT: a vector is made of a pool

  T* allocate(size_t count) {
    if (count * sizeof(T) < kSmallBytes) return static_cast<T*>(::operator new(count * sizeof(T)));
    auto buffer = pool_->take(static_cast<int64_t>(count * sizeof(T)));
    T* data = reinterpret_cast<T*>(buffer->data);
    held_->emplace(data, std::move(buffer));
    return data;
  }

  void deallocate(T* data, size_t count) noexcept {
    if (count * sizeof(T) < kSmallBytes) {
      ::operator delete(data);
    } else {
      held_->erase(data);
    }
  }

  bool operator==(const Pooled& other) const { return held_ == other.held_; }

 private:
  static constexpr size_t kSmallBytes = 32 << 10;

  std::shared_ptr<BufferPool> pool_;
  std::shared_ptr<std::unordered_map<T*, std::shared_ptr<Buffer>>> held_ =
      std::make_shared<std::unordered_map<T*, std::shared_ptr<Buffer>>>();
};

template <typename T>
using PooledVector = std::vector<T, Pooled<T>>;

}  // namespace espnx::io
