// See row_plan.hpp.
#include "device/row_plan.hpp"

#include <algorithm>

namespace espnx::device {
namespace {

// The blocks of one head of one segment that hold rows.
struct Run {
  int64_t file, offset_bytes, n_blocks;
  int64_t segment, head_index;
};

std::vector<Run> runs_of(const std::vector<RowSegment>& segments, const RowGeometry& geometry) {
  std::vector<Run> runs;
  for (size_t s = 0; s < segments.size(); ++s) {
    const RowSegment& segment = segments[s];
    const int64_t used = (segment.n_rows + geometry.block_rows - 1) / geometry.block_rows;
    if (used == 0) continue;
    for (int64_t i = 0; i < segment.n_heads; ++i) {
      const int64_t offset_bytes = segment.offset_bytes + i * segment.n_blocks * geometry.block_bytes;
      runs.push_back({segment.file, offset_bytes, used, static_cast<int64_t>(s), i});
    }
  }
  std::stable_sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) {
    return a.file != b.file ? a.file < b.file : a.offset_bytes < b.offset_bytes;
  });
  return runs;
}

// A block range of a unit, in blocks from the unit's first, that came from block `begin` on of a run.
void add_piece(RowUnit& unit, const RowSegment& segment, const Run& run, int64_t begin, int64_t n_blocks,
               int64_t unit_block, const RowGeometry& geometry) {
  const int64_t first_row = begin * geometry.block_rows;
  unit.pieces.push_back(
      {segment.sequence, segment.first_head + run.head_index * segment.head_step, unit_block * geometry.block_bytes,
       std::min(n_blocks * geometry.block_rows, segment.n_rows - first_row), segment.first_position + first_row});
}

}  // namespace

std::vector<RowUnit> plan_rows(const std::vector<RowSegment>& segments, const RowGeometry& geometry,
                               int64_t unit_bytes) {
  const int64_t unit_blocks = std::max<int64_t>(1, unit_bytes / geometry.block_bytes);
  const std::vector<Run> runs = runs_of(segments, geometry);
  std::vector<RowUnit> units;
  for (size_t first = 0; first < runs.size();) {
    // Runs at one place are the same blocks, of which each may use another number.
    size_t last = first;
    int64_t longest = 0;
    while (last < runs.size() && runs[last].file == runs[first].file &&
           runs[last].offset_bytes == runs[first].offset_bytes) {
      longest = std::max(longest, runs[last++].n_blocks);
    }
    const RowSegment& place = segments[runs[first].segment];
    const int64_t first_sum = place.first_sum + runs[first].head_index * place.n_blocks;
    for (int64_t begin = 0; begin < longest;) {
      const int64_t offset_bytes = runs[first].offset_bytes + begin * geometry.block_bytes;
      const bool follows = !units.empty() && units.back().file == place.file &&
                           units.back().offset_bytes + units.back().size_bytes == offset_bytes &&
                           static_cast<int64_t>(units.back().first_sum.size()) < unit_blocks;
      if (!follows) units.push_back({place.file, offset_bytes, 0, {}, {}});
      RowUnit& unit = units.back();
      const auto held = static_cast<int64_t>(unit.first_sum.size());
      const int64_t taken = std::min(longest - begin, unit_blocks - held);
      for (size_t r = first; r < last; ++r) {
        const int64_t used = std::min(taken, runs[r].n_blocks - begin);
        if (used > 0) add_piece(unit, segments[runs[r].segment], runs[r], begin, used, held, geometry);
      }
      for (int64_t i = 0; i < taken; ++i) unit.first_sum.push_back(first_sum + begin + i);
      unit.size_bytes += taken * geometry.block_bytes;
      begin += taken;
    }
    first = last;
  }
  return units;
}

}  // namespace espnx::device
