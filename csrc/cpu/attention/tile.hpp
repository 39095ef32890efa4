// One tile of at most kTileRows rows, as a block of queries sees it.
#pragma once

#include "kernels.hpp"

namespace espnx {

constexpr int64_t kMaxBlock = 256;  // queries walked together

class AttentionTile {
 public:
  // block_offset_bytes: nullptr where blocks are a stride apart.
  AttentionTile(const AttentionQueries& queries, const AttentionRows& rows,
                const int64_t* block_offset_bytes)
      : k_row_bytes(queries.d * item_bytes(rows.format)),
        v_row_bytes(queries.dv * item_bytes(rows.format)),
        queries_(queries),
        rows_(rows),
        block_offset_bytes_(block_offset_bytes) {}

  // Moves to the rows from `begin` on and the queries [first, first + count), count up to
  // kMaxBlock. False where none of them sees any of the rows; then the rest is unspecified.
  bool move(int64_t begin, int64_t first, int64_t count);

  // Queries are counted from the block's first, rows from the tile's.
  bool sees(int64_t query, int64_t row) const {
    return row >= lo[query] && row < hi[query] && (visible == nullptr || visible[row] != 0);
  }
  bool sees_any(int64_t query) const { return lo[query] < hi[query]; }

  // Where K's row behind a row lies if nothing comes between them: what is worth prefetching.
  const uint8_t* k_behind(int64_t row) const;

  const int64_t k_row_bytes, v_row_bytes;
  int64_t n = 0;               // rows in the tile
  int64_t first_position = 0;  // of the tile's first row
  int64_t lo[kMaxBlock],
      hi[kMaxBlock];  // per query: it sees the rows from lo to hi, but for those that `visible`
                      // hides
  const uint8_t* visible = nullptr;  // nullptr where nothing is hidden
  bool is_whole = false;             // every query sees every row
  int64_t n_spans = 0;
  RowSpan k_spans[kTileRows], v_spans[kTileRows];

 private:
  bool look(int64_t begin, int64_t first, int64_t count);
  void cut(int64_t begin);
  int64_t offset_of(int64_t block) const {
    return block_offset_bytes_ ? block_offset_bytes_[block] : block * rows_.block_stride_bytes;
  }

  const AttentionQueries& queries_;
  const AttentionRows& rows_;
  const int64_t* const block_offset_bytes_;
};

}  // namespace espnx
