#include "layout.hpp"

#include <algorithm>
#include <numeric>
#include <string>

#include "failure.hpp"

namespace espnx::io {
namespace {

int64_t round_down(int64_t value, int64_t alignment) { return value / alignment * alignment; }
int64_t round_up(int64_t value, int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

constexpr int64_t kPlanBytesMax = int64_t{1} << 46;  // beyond any machine's address space

[[noreturn]] void invalid(const std::string& what, int64_t item) {
  Failure failure;
  failure.kind = Kind::invalid;
  failure.what = "descriptor " + std::to_string(item) + " of the plan: " + what;
  throw FailureError(failure);
}

std::vector<int64_t> file_order(const Items& items) {
  std::vector<int64_t> order(items.count);
  std::iota(order.begin(), order.end(), 0);
  const auto before = [&](int64_t a, int64_t b) {
    if (items.file[a] != items.file[b]) return items.file[a] < items.file[b];
    if (items.offset_bytes[a] != items.offset_bytes[b])
      return items.offset_bytes[a] < items.offset_bytes[b];
    return a < b;
  };
  if (!std::is_sorted(order.begin(), order.end(), before))
    std::sort(order.begin(), order.end(), before);
  return order;
}

// The earliest needed first; memory places were given before, in file order, and stay.
void sort_by_need(Layout& layout) {
  std::vector<int64_t> need(layout.extents.size());
  std::vector<size_t> rank(layout.extents.size());
  for (size_t i = 0; i < layout.extents.size(); ++i) {
    const Extent& extent = layout.extents[i];
    need[i] =
        *std::min_element(layout.order.begin() + extent.first, layout.order.begin() + extent.last);
    rank[i] = i;
  }
  if (std::is_sorted(need.begin(), need.end())) return;
  std::sort(rank.begin(), rank.end(), [&](size_t a, size_t b) { return need[a] < need[b]; });
  std::vector<Extent> sorted;
  sorted.reserve(layout.extents.size());
  for (size_t i : rank) sorted.push_back(layout.extents[i]);
  layout.extents = std::move(sorted);
}

void set_expected(Extent& extent, const Files& files, bool reading) {
  extent.expected_bytes = extent.size_bytes;
  if (reading)
    extent.expected_bytes =
        std::min(extent.size_bytes, files[extent.file]->size_bytes - extent.offset_bytes);
}

}  // namespace

void check_items(const Items& items, const Files& files, bool reading) {
  const auto count = static_cast<int64_t>(files.size());
  int64_t total_bytes = 0;
  for (int64_t i = 0; i < items.count; ++i) {
    const int64_t file = items.file[i], offset = items.offset_bytes[i], size = items.size_bytes[i];
    if (file < 0 || file >= count)
      invalid("file " + std::to_string(file) + " is not open in this engine", i);
    if (!files[file]) invalid("file " + std::to_string(file) + " was closed", i);
    if (offset < 0 || size < 0 || offset > INT64_MAX - size - 2 * kBlockBytes) {
      invalid("offset " + std::to_string(offset) + " and size " + std::to_string(size) +
                  " are out of range",
              i);
    }
    // A sparse file can be longer than any memory; sums of sizes must not overflow.
    if (size > kPlanBytesMax - total_bytes)
      invalid("the plan moves more than " + std::to_string(kPlanBytesMax) + " bytes", i);
    total_bytes += size;
    if (!reading) {
      if (!files[file]->writable) invalid(files[file]->path + " is open for reading only", i);
      continue;
    }
    if (offset + size > files[file]->size_bytes &&
        (files[file]->fd < 0 || offset + size > files[file]->refresh_size())) {
      Failure failure;
      failure.kind = Kind::truncated;
      failure.what = "read past the end of the file";
      failure.path = files[file]->path;
      failure.offset_bytes = offset;
      failure.size_bytes = size;
      failure.got = "a file of " + std::to_string(files[file]->size_bytes) + " bytes";
      failure.expected = "at least " + std::to_string(offset + size);
      throw FailureError(failure);
    }
  }
}

Layout pack(const Items& items, const Files& files, int64_t gap_bytes, int64_t limit_bytes) {
  Layout layout;
  layout.position_bytes.assign(items.count, -1);
  layout.order.reserve(items.count);
  for (int64_t i : file_order(items)) {
    if (items.size_bytes[i] == 0) continue;
    layout.asked_bytes += items.size_bytes[i];
    const int64_t alignment = files[items.file[i]]->alignment_bytes;
    const int64_t begin = round_down(items.offset_bytes[i], alignment);
    const int64_t end = round_up(items.offset_bytes[i] + items.size_bytes[i], alignment);
    Extent* last = layout.extents.empty() ? nullptr : &layout.extents.back();
    const int64_t last_end = last ? last->offset_bytes + last->size_bytes : 0;
    const bool joins = last && last->file == items.file[i] && begin - last_end <= gap_bytes &&
                       (end <= last_end || end - last->offset_bytes <= limit_bytes);
    if (!joins) {
      layout.extents.emplace_back();
      last = &layout.extents.back();
      last->file = items.file[i];
      last->offset_bytes = begin;
      last->first = last->last = static_cast<int64_t>(layout.order.size());
    }
    last->size_bytes = std::max(last->size_bytes, end - last->offset_bytes);
    last->last = static_cast<int64_t>(layout.order.size()) + 1;
    layout.order.push_back(i);
  }
  for (Extent& extent : layout.extents) {
    set_expected(extent, files, true);
    extent.place_bytes = layout.memory_bytes;
    layout.memory_bytes += round_up(extent.size_bytes, kBlockBytes);
    for (int64_t at = extent.first; at < extent.last; ++at) {
      const int64_t i = layout.order[at];
      layout.position_bytes[i] = extent.place_bytes + items.offset_bytes[i] - extent.offset_bytes;
    }
  }
  sort_by_need(layout);
  return layout;
}

bool place(const Items& items, const Files& files, const int64_t* out_offset_bytes,
           const char* base, bool reading, int64_t limit_bytes, Layout& layout) {
  layout = Layout();
  layout.position_bytes.assign(items.count, -1);
  layout.order.reserve(items.count);
  layout.extents.reserve(items.count);
  // In the plan's own order: the caller chose both ends of every item, so only neighbours in the
  // plan can be one request.
  for (int64_t i = 0; i < items.count; ++i) {
    const int64_t size = items.size_bytes[i], offset = items.offset_bytes[i],
                  to = out_offset_bytes[i];
    if (size == 0) continue;
    const int64_t alignment = files[items.file[i]]->alignment_bytes;
    const auto address = reinterpret_cast<intptr_t>(base) + to;
    if (offset % alignment != 0 || size % alignment != 0 || address % alignment != 0) return false;
    layout.asked_bytes += size;
    layout.position_bytes[i] = to;
    layout.memory_bytes = std::max(layout.memory_bytes, to + size);
    Extent* last = layout.extents.empty() ? nullptr : &layout.extents.back();
    const bool joins =
        last && last->file == items.file[i] && last->offset_bytes + last->size_bytes == offset &&
        last->place_bytes + last->size_bytes == to && last->size_bytes + size <= limit_bytes;
    if (!joins) {
      layout.extents.emplace_back();
      last = &layout.extents.back();
      last->file = items.file[i];
      last->offset_bytes = offset;
      last->place_bytes = to;
      last->first = static_cast<int64_t>(layout.order.size());
    }
    last->size_bytes += size;
    layout.order.push_back(i);
    last->last = static_cast<int64_t>(layout.order.size());
  }
  for (Extent& extent : layout.extents) set_expected(extent, files, reading);
  return true;
}

}  // namespace espnx::io
