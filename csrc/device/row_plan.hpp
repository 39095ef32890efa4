// Where the rows of one layer lie on a device, and how they are cut into reads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/attention/attention.hpp"
#include "io/pooled.hpp"

namespace espnx::device {

// Blocks of `rows` tokens, all of one size: K rows, then V rows; or X rows alone, which stand for
// both.
struct RowGeometry {
  RowFormat format = RowFormat::fp16;
  int64_t d = 0, dv = 0;                                       // of a K and of a V row
  bool is_shared = false;                                      // X: one row is K and V at once
  int64_t block_rows = 0;                                      // tokens in a block
  int64_t block_bytes = 0;                                     // a multiple of 4096
  int64_t k_offset_bytes = 0, v_offset_bytes = 0;              // of the K and V rows in a block
  int64_t k_scale_offset_bytes = 0, v_scale_offset_bytes = 0;  // int8 alone
};

// Consecutive tokens of one sequence, for some of its heads: [heads][blocks][block_bytes], one
// after another in a file. Sequences that share rows (beams, prefixes) name the same place.
struct RowSegment {
  int64_t file, offset_bytes;
  int64_t sequence;
  int64_t first_head, head_step, n_heads;  // the heads that lie here: first, first + step, ...
  int64_t n_blocks;                        // of each head
  int64_t n_rows;                          // of each head that count, from the first on
  int64_t first_position;
  const uint32_t* sums;  // CRC32C of the blocks, [heads][blocks]
};

// Rows of a read that belong to one (sequence, head).
struct RowPiece {
  int64_t sequence, head;
  int64_t offset_bytes;  // in the read
  int64_t n_rows, first_position;
};

// A part of a list.
template <typename T>
struct Some {
  const T* first;
  int64_t count;

  const T* begin() const { return first; }
  const T* end() const { return first + count; }
};

// Checksums of blocks that follow one another.
using RowSums = Some<uint32_t>;

// One read: whole blocks that follow one another in a file.
struct RowUnit {
  int64_t file, offset_bytes, size_bytes;
  int64_t first_piece, n_pieces, first_sums, n_sums;  // in the plan's lists
};

// The reads of some segments. Three lists, however many reads there are: they come and go in whole
// mappings, and leave the allocator's heap as it was.
struct RowPlan {
  explicit RowPlan(const std::shared_ptr<io::BufferPool>& pool)
      : units(pool), all_pieces(pool), all_sums(pool) {}

  Some<RowPiece> pieces(const RowUnit& unit) const {
    return {all_pieces.data() + unit.first_piece, unit.n_pieces};
  }
  Some<RowSums> sums(const RowUnit& unit) const {
    return {all_sums.data() + unit.first_sums, unit.n_sums};
  }

  io::PooledVector<RowUnit> units;
  io::PooledVector<RowPiece> all_pieces;
  io::PooledVector<RowSums> all_sums;
};

// Cuts the segments into reads of at most `unit_bytes` (at least a block), in the order of the
// file; what several segments share is read once.
RowPlan plan_rows(const std::vector<RowSegment>& segments, const RowGeometry& geometry,
                  int64_t unit_bytes, const std::shared_ptr<io::BufferPool>& pool);

}  // namespace espnx::device
