// See row_plan.hpp.
#include "row_plan.hpp"

#include <algorithm>
#include <tuple>

namespace espnx::device {
namespace {

// The blocks of one head of one segment that hold rows.
struct Run {
  int64_t file, offset_bytes, n_blocks;
  int64_t segment, head_index;
};

io::PooledVector<Run> runs_of(const std::vector<RowSegment>& segments, const RowGeometry& geometry,
                              const std::shared_ptr<io::BufferPool>& pool) {
  io::PooledVector<Run> runs(pool);
  int64_t count = 0;
  for (const RowSegment& segment : segments) count += segment.n_heads;
  runs.reserve(count);
  for (size_t s = 0; s < segments.size(); ++s) {
    const RowSegment& segment = segments[s];
    const int64_t used = (segment.n_rows + geometry.block_rows - 1) / geometry.block_rows;
    if (used == 0) continue;
    for (int64_t i = 0; i < segment.n_heads; ++i) {
      const int64_t offset_bytes =
          segment.offset_bytes + i * segment.n_blocks * geometry.block_bytes;
      runs.push_back({segment.file, offset_bytes, used, static_cast<int64_t>(s), i});
    }
  }
  // In place, where a stable sort would need as much memory again.
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) {
    return std::tie(a.file, a.offset_bytes, a.segment) <
           std::tie(b.file, b.offset_bytes, b.segment);
  });
  return runs;
}

// A block range of a unit, in blocks from the unit's first, that came from block `begin` on of a
// run.
void add_piece(RowPlan& plan, const RowSegment& segment, const Run& run, int64_t begin,
               int64_t n_blocks, int64_t unit_block, const RowGeometry& geometry) {
  const int64_t first_row = begin * geometry.block_rows;
  plan.all_pieces.push_back({segment.sequence,
                             segment.first_head + run.head_index * segment.head_step,
                             unit_block * geometry.block_bytes,
                             std::min(n_blocks * geometry.block_rows, segment.n_rows - first_row),
                             segment.first_position + first_row});
  ++plan.units.back().n_pieces;
}

void add_sums(RowPlan& plan, const uint32_t* first, int64_t count) {
  RowUnit& unit = plan.units.back();
  if (unit.n_sums > 0 && plan.all_sums.back().first + plan.all_sums.back().count == first) {
    plan.all_sums.back().count += count;
  } else {
    plan.all_sums.push_back({first, count});
    ++unit.n_sums;
  }
}

}  // namespace

RowPlan plan_rows(const std::vector<RowSegment>& segments, const RowGeometry& geometry,
                  int64_t unit_bytes, const std::shared_ptr<io::BufferPool>& pool) {
  const int64_t unit_blocks = std::max<int64_t>(1, unit_bytes / geometry.block_bytes);
  const io::PooledVector<Run> runs = runs_of(segments, geometry, pool);
  RowPlan plan(pool);
  plan.all_pieces.reserve(runs.size());
  for (size_t first = 0; first < runs.size();) {
    // Runs at one place are the same blocks, of which each may use another number.
    size_t last = first;
    int64_t longest = 0;
    while (last < runs.size() && runs[last].file == runs[first].file &&
           runs[last].offset_bytes == runs[first].offset_bytes) {
      longest = std::max(longest, runs[last++].n_blocks);
    }
    const RowSegment& place = segments[runs[first].segment];
    const uint32_t* sums = place.sums + runs[first].head_index * place.n_blocks;
    for (int64_t begin = 0; begin < longest;) {
      const int64_t offset_bytes = runs[first].offset_bytes + begin * geometry.block_bytes;
      const bool follows =
          !plan.units.empty() && plan.units.back().file == place.file &&
          plan.units.back().offset_bytes + plan.units.back().size_bytes == offset_bytes &&
          plan.units.back().size_bytes < unit_blocks * geometry.block_bytes;
      if (!follows) {
        plan.units.push_back({place.file, offset_bytes, 0,
                              static_cast<int64_t>(plan.all_pieces.size()), 0,
                              static_cast<int64_t>(plan.all_sums.size()), 0});
      }
      RowUnit& unit = plan.units.back();
      const int64_t held = unit.size_bytes / geometry.block_bytes;
      const int64_t taken = std::min(longest - begin, unit_blocks - held);
      for (size_t r = first; r < last; ++r) {
        const int64_t used = std::min(taken, runs[r].n_blocks - begin);
        if (used > 0)
          add_piece(plan, segments[runs[r].segment], runs[r], begin, used, held, geometry);
      }
      add_sums(plan, sums + begin, taken);
      unit.size_bytes += taken * geometry.block_bytes;
      begin += taken;
    }
    first = last;
  }
  return plan;
}

}  // namespace espnx::device
