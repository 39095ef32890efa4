#include "cpu/places.hpp"

#include <algorithm>

namespace espnx {
namespace {

// The largest power of two, to kPlaceMultiple, that divides every number whose bits these are.
int64_t multiple_of(uint64_t bits) {
  const uint64_t all = bits | kPlaceMultiple;
  return static_cast<int64_t>(all & (~all + 1));
}

}  // namespace

RecordsFound look_at_records(const RecordPlaces& places, int64_t* begin) {
  uint64_t addresses = 0, counts = 0;
  int64_t most = 0, total = 0;
  for (int64_t i = 0; i < places.n; ++i) {
    const int64_t offset = places.offset_bytes[i], count = places.count[i];
    int64_t size = 0;  // of any count, so the product may overflow; then no memory is so large
    const bool is_right = count >= 0 && count <= places.count_max && offset >= 0 &&
                          offset <= places.buffer_bytes &&
                          !__builtin_mul_overflow(count, places.unit_bytes, &size) &&
                          size <= places.buffer_bytes - offset;
    if (!is_right) return {i, 1, 1, 0, 0};
    addresses |= places.address + static_cast<uint64_t>(offset);
    counts |= static_cast<uint64_t>(count);
    most = std::max(most, count);
    if (begin != nullptr) begin[i] = total;
    total = count > kTotalBytesMax - total ? kTotalBytesMax + 1 : total + count;
  }
  if (begin != nullptr) begin[places.n] = total;
  return {-1, multiple_of(addresses), multiple_of(counts), most, total};
}

BlocksFound look_at_blocks(const BlockPlaces& places) {
  constexpr BlocksFound kWrong{false, 1, 0};
  int64_t most = 0;
  for (int64_t i = 0; i < places.n; ++i) {
    if (places.n_rows[i] < 0 || places.n_rows[i] > places.rows_max) return kWrong;
    most = std::max(most, places.n_rows[i]);
  }
  uint64_t addresses = 0;
  const int64_t last = places.buffer_bytes - places.block_bytes;  // below 0: no block fits
  for (int64_t head = 0; head < places.n * places.n_kv; ++head) {
    const int64_t* offset = places.offset_bytes + head * places.n_blocks;
    const int64_t rows = places.n_rows[head / places.n_kv];
    const int64_t needed = rows / places.block_rows + (rows % places.block_rows != 0);
    for (int64_t block = 0; block < needed; ++block) {
      if (offset[block] < 0 || offset[block] > last) return kWrong;
      addresses |= places.address + static_cast<uint64_t>(offset[block]);
    }
  }
  return {true, multiple_of(addresses), most};
}

}  // namespace espnx
