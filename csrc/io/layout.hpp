// From descriptors to requests: widens to the device's alignment, merges neighbours, and says where
// each item will lie in memory.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "file.hpp"

namespace espnx::io {

// n descriptors, structure of arrays; borrowed.
struct Items {
  int64_t count = 0;
  const int64_t* file = nullptr;
  const int64_t* offset_bytes = nullptr;
  const int64_t* size_bytes = nullptr;
};

// One contiguous piece of one file that goes to (or comes from) one contiguous piece of memory.
struct Extent {
  int64_t file = 0;
  int64_t offset_bytes = 0;
  int64_t size_bytes = 0;       // what is asked of the device: aligned
  int64_t expected_bytes = 0;   // what it must deliver: less than size only at the end of the file
  int64_t place_bytes = 0;      // in memory
  int64_t first = 0, last = 0;  // items, as a range of Layout::order
};

struct Layout {
  std::vector<Extent> extents;  // in the order in which the plan first needs them
  std::vector<int64_t> order;   // item numbers, grouped by extent
  std::vector<int64_t>
      position_bytes;  // per item: where its first byte lies in memory (-1 for an empty item)
  int64_t memory_bytes = 0;
  int64_t asked_bytes = 0;
};

using Files = std::vector<std::shared_ptr<File>>;

// Throws FailureError: invalid (unknown file, negative numbers), truncated (an item ends after its
// file).
void check_items(const Items& items, const Files& files, bool reading);

// Items are packed: merged extents lie one after another. Neighbours join when the hole between
// them is at most `gap_bytes` and the joined extent at most `limit_bytes`.
Layout pack(const Items& items, const Files& files, int64_t gap_bytes, int64_t limit_bytes);

// Items go exactly where the caller says; nothing is widened. False if that cannot be done without
// a copy, because some offset, size or address is not aligned for its file.
bool place(const Items& items, const Files& files, const int64_t* out_offset_bytes,
           const char* base, bool reading, int64_t limit_bytes, Layout& layout);

}  // namespace espnx::io
