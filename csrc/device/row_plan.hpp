// Where the rows of one layer lie on a device, and how they are cut into reads.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/attention.hpp"

namespace espnx::device {

// Blocks of `rows` tokens, all of one size: K rows, then V rows; or X rows alone, which stand for both.
struct RowGeometry {
  RowFormat format = RowFormat::fp16;
  int64_t d = 0, dv = 0;                                       // of a K and of a V row
  bool is_shared = false;                                      // X: one row is K and V at once
  int64_t block_rows = 0;                                      // tokens in a block
  int64_t block_bytes = 0;                                     // a multiple of 4096
  int64_t k_offset_bytes = 0, v_offset_bytes = 0;              // of the K and V rows in a block
  int64_t k_scale_offset_bytes = 0, v_scale_offset_bytes = 0;  // int8 alone
};

// Consecutive tokens of one sequence, for some of its heads: [heads][blocks][block_bytes], one after another in a file.
// Sequences that share rows (beams, prefixes) name the same place.
struct RowSegment {
  int64_t file, offset_bytes;
  int64_t sequence;
  int64_t first_head, head_step, n_heads;  // the heads that lie here: first, first + step, ...
  int64_t n_blocks;                        // of each head
  int64_t n_rows;                          // of each head that count, from the first on
  int64_t first_position;
  int64_t first_sum;  // of the blocks' checksums, [heads][blocks]
};

// Rows of a read that belong to one (sequence, head).
struct RowPiece {
  int64_t sequence, head;
  int64_t offset_bytes;  // in the read
  int64_t n_rows, first_position;
};

// One read: whole blocks that follow one another in a file.
struct RowUnit {
  int64_t file, offset_bytes, size_bytes;
  std::vector<int64_t> first_sum;  // of each block: the number of its checksum
  std::vector<RowPiece> pieces;
};

constexpr int64_t kSegmentFields = 10;

// Cuts the segments into reads of at most `unit_bytes` (at least a block), in the order of the file; what several
// segments share is read once.
std::vector<RowUnit> plan_rows(const std::vector<RowSegment>& segments, const RowGeometry& geometry,
                               int64_t unit_bytes);

}  // namespace espnx::device
