// K and V of a draft in four bits: K by channel, V by token (KIVI, section 3.2), in pages of
// kPackedRows tokens of one (sequence, KV head), one after another:
//   K   fp16 [d] steps, fp16 [d] least values, codes [kPackedRows / 2, d]
//   V   fp16 [kPackedRows, groups] steps, fp16 [kPackedRows, groups] least values, codes
//       [kPackedRows / 2, dv]
// A code of value i is round((x - least) / step), 0 to 15. A byte has the codes of two tokens that
// follow one another at one channel, the first's in the lower half. V's groups are kPackedChannels
// channels each, the last perhaps fewer.
#pragma once

#include <cstdint>

namespace espnx {

constexpr int64_t kPackedRows = 32, kPackedChannels = 64;

inline int64_t packed_groups(int64_t dv) { return (dv + kPackedChannels - 1) / kPackedChannels; }
inline int64_t packed_page_bytes(int64_t d, int64_t dv) {
  return (4 + kPackedRows / 2) * d + kPackedRows * (4 * packed_groups(dv)) + kPackedRows / 2 * dv;
}

// Writes k [kPackedRows, d] and v [kPackedRows, dv] of a page. `page` is even.
void unpack_page(const uint8_t* page, int64_t d, int64_t dv, float* k, float* v);

// The other way round, to the bit as pack_pages_reference of espnx/ops/attention/packed.py.
void pack_page(const float* k, const float* v, int64_t d, int64_t dv, uint8_t* page);

}  // namespace espnx
