// One look at every entry of the tables that say where in a buffer something lies, before anything
// is read there: for kernels of other processors, which look at none of them.
#pragma once

#include <cstdint>

namespace espnx {

// What kernels are told of addresses and sizes is at most that they are multiples of so many bytes.
constexpr int64_t kPlaceMultiple = 16;
// Sums of sizes stay far below what 64 bits hold; no memory is so large.
constexpr int64_t kTotalBytesMax = int64_t{1} << 60;

// Records of a buffer, each so many units long.
struct RecordPlaces {
  const int64_t* offset_bytes;  // [n], any values
  const int64_t* count;         // [n], any values
  int64_t n;
  int64_t unit_bytes;  // 1 or more
  int64_t count_max;   // of a record
  int64_t buffer_bytes;
  uint64_t address;  // of the buffer
};

struct RecordsFound {
  int64_t outside;  // the first record that is not wholly inside the buffer, or has a wrong
                    // count; or -1. If there is one, nothing below means anything
  int64_t address_multiple;  // the largest power of two, to 16, that divides all addresses
  int64_t count_multiple;    // and all counts
  int64_t count_most;        // 0 without records
  int64_t total;             // of all counts; beyond kTotalBytesMax: that and one more
};

// `begin`: [n + 1], for the sums of the counts before each record and of all, or nullptr.
RecordsFound look_at_records(const RecordPlaces& places, int64_t* begin = nullptr);

// Blocks of rows, as attention takes them.
struct BlockPlaces {
  const int64_t* offset_bytes;  // [n, n_kv, n_blocks], any values; those beyond a sequence's rows
                                // are not looked at
  const int64_t* n_rows;        // [n], any values
  int64_t n, n_kv, n_blocks;
  int64_t block_rows, block_bytes;  // 1 or more
  int64_t rows_max;                 // of a sequence: what its blocks have room for, at most
  int64_t buffer_bytes;
  uint64_t address;  // of the buffer
};

struct BlocksFound {
  bool is_right;  // every number of rows is one, and every block that has some of them lies wholly
                  // inside the buffer. Else nothing below means anything
  int64_t address_multiple;  // of those blocks: the largest power of two, to 16
  int64_t rows_most;         // 0 without sequences
};

BlocksFound look_at_blocks(const BlockPlaces& places);

}  // namespace espnx
