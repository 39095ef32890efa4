// Finds where a tile's rows lie and who sees them.
#include "tile.hpp"

#include <algorithm>

namespace espnx {

bool AttentionTile::move(int64_t begin, int64_t first, int64_t count) {
  n = std::min(kTileRows, rows_.n_rows - begin);
  first_position = rows_.first_position + begin;
  if (!look(begin, first, count)) return false;
  cut(begin);
  return true;
}

bool AttentionTile::look(int64_t begin, int64_t first, int64_t count) {
  const int64_t position = first_position;
  visible = nullptr;
  if (rows_.visible != nullptr) {
    const uint8_t* marks = rows_.visible + begin;
    const int64_t hidden = std::count(marks, marks + n, uint8_t{0});
    if (hidden == n) return false;
    if (hidden > 0) visible = marks;
  }
  bool is_any = false;
  is_whole = visible == nullptr;
  for (int64_t i = 0; i < count; ++i) {
    lo[i] = 0;
    hi[i] = n;
    if (queries_.last_position != nullptr) {
      hi[i] = std::clamp(queries_.last_position[first + i], position - 1, position + n - 1) -
              position + 1;
    }
    if (queries_.first_visible != nullptr) {
      lo[i] = std::clamp(queries_.first_visible[first + i], position, position + n) - position;
    }
    is_any |= sees_any(i);
    is_whole &= lo[i] == 0 && hi[i] == n;
  }
  return is_any;
}

// Rows as runs that lie in one block each.
void AttentionTile::cut(int64_t begin) {
  n_spans = 0;
  for (int64_t row = begin; row < begin + n;) {
    const int64_t block = row / rows_.block_rows, in_block = row % rows_.block_rows;
    const int64_t offset = offset_of(block);
    const uint8_t* k = rows_.k + offset;
    const int64_t run = std::min(rows_.block_rows - in_block, begin + n - row);
    k_spans[n_spans] = {k + in_block * k_row_bytes, nullptr, run,
                        rows_.v + offset + in_block * v_row_bytes, v_row_bytes};
    v_spans[n_spans] = {rows_.v + offset + in_block * v_row_bytes, nullptr, run, nullptr,
                        k_row_bytes};
    const int64_t later = row + kTileRows;
    if (later < rows_.n_rows) {
      const int64_t later_block = later / rows_.block_rows;
      v_spans[n_spans].ahead =
          rows_.k + offset_of(later_block) + later % rows_.block_rows * k_row_bytes;
    }
    if (rows_.v == rows_.k) k_spans[n_spans].ahead = nullptr;  // X rows: V is K
    if (rows_.format == RowFormat::int8) {
      k_spans[n_spans].scales = k + rows_.k_scale_offset_bytes;
      v_spans[n_spans].scales =
          k + rows_.v_scale_offset_bytes + in_block * static_cast<int64_t>(sizeof(float));
    }
    ++n_spans;
    row += run;
  }
}

const uint8_t* AttentionTile::k_behind(int64_t row) const {
  int64_t s = 0;
  while (row >= k_spans[s].n) row -= k_spans[s++].n;
  const bool is_last = row + 1 == k_spans[s].n;
  return is_last && s + 1 < n_spans ? k_spans[s + 1].rows
                                    : k_spans[s].rows + (row + 1) * k_row_bytes;
}

}  // namespace espnx
