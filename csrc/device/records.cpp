#include "records.hpp"

#include <algorithm>

namespace espnx {
namespace {

int64_t blocks(int64_t bytes) { return (bytes + kRecordBlockBytes - 1) / kRecordBlockBytes; }

}  // namespace

int64_t place_record(int64_t free_at_bytes, int64_t size_bytes) {
  const int64_t into_block = free_at_bytes % kRecordBlockBytes;
  if (blocks(into_block + size_bytes) <= blocks(size_bytes)) return free_at_bytes;
  return free_at_bytes - into_block + kRecordBlockBytes;
}

int64_t lay_out_records(const uint16_t* n_tokens, int64_t count, const RecordShape& shape,
                        int64_t begin_bytes, int64_t* offset_bytes) {
  int64_t free_at = begin_bytes;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t size = shape.size_bytes(n_tokens[i]);
    offset_bytes[i] = place_record(free_at, size);
    free_at = offset_bytes[i] + size;
  }
  return free_at;
}

void locate_records(const int64_t* records, int64_t count, const uint16_t* n_tokens,
                    const int64_t* group_offset_bytes, const int64_t* segment_begin,
                    int64_t segments, const RecordShape& shape, int64_t* segment,
                    int64_t* offset_bytes, int64_t* size_bytes) {
  int64_t walk = -1,
          at = 0;  // the last record found and its offset: ascending records share a walk
  for (int64_t i = 0; i < count; ++i) {
    const int64_t record = records[i];
    const int64_t group = record / kGroupRecords;
    if (walk > record || walk / kGroupRecords != group || walk < 0) {
      walk = group * kGroupRecords;
      at = group_offset_bytes[group];
    }
    for (; walk < record; ++walk) {
      at =
          place_record(at + shape.size_bytes(n_tokens[walk]), shape.size_bytes(n_tokens[walk + 1]));
    }
    segment[i] =
        std::upper_bound(segment_begin, segment_begin + segments, record) - segment_begin - 1;
    offset_bytes[i] = at;
    size_bytes[i] = shape.size_bytes(n_tokens[record]);
  }
}

}  // namespace espnx
