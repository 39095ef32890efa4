// Records checked and scored in an I/O buffer, a batch of arrivals at a time: header, CRC32C, then
// cls_weight * CLS + MaxSim for every query that wants the record. The layout of a record is
// docs/store-format.md's.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/maxsim/maxsim.hpp"
#include "records.hpp"

namespace espnx {

// What every record of a tier has in common.
struct RecordRules {
  uint32_t salt;   // seeds the checksums
  uint8_t format;  // the byte in the header
  RecordShape shape;
  TokenFormat tokens, cls;
  int64_t dim, d_cls;       // d_cls = 0: records hold no CLS vector
  MaxsimCodebook codebook;  // of residual formats
};

// The records of one read.
struct RecordItems {
  const uint8_t* memory;
  int64_t memory_bytes;
  const int64_t* position_bytes;  // by item
  const int64_t* numbers;         // by item
  const uint16_t* n_tokens;       // by record number
};

struct RecordQuery {
  const float* tokens;  // [n_tokens, dim]
  int64_t n_tokens;
  const float* cls;  // [d_cls]
  float cls_weight;
};

// Which query wants which item, ordered by item. Without pairs the one query wants every item, and
// scores are by item.
struct RecordPairs {
  const int64_t* item = nullptr;
  const int64_t* query = nullptr;
  int64_t count = 0;
};

// The first of `items` that is not the whole, intact record it must be, or -1.
int64_t find_damaged(const RecordRules& rules, const RecordItems& records,
                     const std::vector<int64_t>& items);

// Scores pairs of items that have been checked. Not thread-safe; buffers are kept from call to
// call.
class RecordScorer {
 public:
  RecordScorer(const RecordRules& rules, const RecordItems& records,
               std::vector<RecordQuery> queries, RecordPairs pairs, int max_threads, float* scores);

  // Scores all pairs of `items`. Returns an item that names a centroid which is not in the
  // codebook, or -1.
  int64_t score(const std::vector<int64_t>& items);

 private:
  int64_t score_query(int64_t query, const int64_t* slots, const int64_t* items, int64_t count);

  const RecordRules rules_;
  const RecordItems records_;
  const std::vector<RecordQuery> queries_;
  const RecordPairs pairs_;
  const int max_threads_;
  float* const scores_;
  std::vector<int64_t> offsets_, counts_;
  std::vector<float> maxsim_, cls_;
};

}  // namespace espnx
