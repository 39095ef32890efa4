// Where records lie: computed from token counts, so that a document costs 2.125 bytes of memory
// instead of an 8-byte offset.
//
// A record starts right after the one before, unless it would then touch more 4 KiB blocks than it
// must: then at the next block. The offset of every 64th record is stored; those between are found
// by walking.
#pragma once

#include <cstdint>

namespace espnx {

inline constexpr int64_t kRecordAlignBytes = 16;
inline constexpr int64_t kRecordBlockBytes = 4096;
inline constexpr int64_t kGroupRecords = 64;

struct RecordShape {
  int64_t fixed_bytes;  // header and CLS vector
  int64_t row_bytes;    // one token

  int64_t size_bytes(int64_t n_tokens) const {
    return (fixed_bytes + n_tokens * row_bytes + kRecordAlignBytes - 1) / kRecordAlignBytes *
           kRecordAlignBytes;
  }
};

// Where a record of `size_bytes` goes when the next free byte is `free_at_bytes`.
int64_t place_record(int64_t free_at_bytes, int64_t size_bytes);

// Offsets of `count` records laid out one after another from `begin_bytes`; returns the first free
// byte after them.
int64_t lay_out_records(const uint16_t* n_tokens, int64_t count, const RecordShape& shape,
                        int64_t begin_bytes, int64_t* offset_bytes);

// Segment and offset of each of `count` record numbers (each in [0, total)). `group_offset_bytes`:
// one entry per 64 records. `segment_begin`: the first record of each of `segments` segments,
// ascending, all multiples of 64.
void locate_records(const int64_t* records, int64_t count, const uint16_t* n_tokens,
                    const int64_t* group_offset_bytes, const int64_t* segment_begin,
                    int64_t segments, const RecordShape& shape, int64_t* segment,
                    int64_t* offset_bytes, int64_t* size_bytes);

}  // namespace espnx
