// Forward records: a record's own terms and what each is worth in it, read at random to give a few
// candidates their exact scores. The specification is docs/postings-format.md.
//
//   record = header, terms (uint16 or uint32 each, ascending), values (a byte or a float32 each),
//            zeros
#pragma once

#include <cstdint>
#include <vector>

#include "list.hpp"

namespace espnx::postings {

struct ForwardHeader {
  uint32_t crc32c;  // of all that follows in the record, its zeros included
  uint32_t salt;
  uint32_t record;
  uint32_t terms;
};
static_assert(sizeof(ForwardHeader) == 16);

struct ForwardRules {
  uint32_t salt;
  ValueKind kind;  // kImpact or kFloat
  int term_bytes;  // 2 or 4
};

// Bytes of a term and its value.
inline int64_t row_bytes(const ForwardRules& rules) {
  return rules.term_bytes + (rules.kind == ValueKind::kFloat ? 4 : 1);
}

// Writes the record `number` of n terms, ascending, and their values (impacts, or the bits of
// floats) to `out`, of `size` bytes.
void write_forward(const ForwardRules& rules, uint32_t number, const uint32_t* terms,
                   const uint32_t* values, int64_t n, uint8_t* out, int64_t size);

// A query's terms in a segment.
class ForwardQuery {
 public:
  // `terms` as the query has them; one may come twice.
  ForwardQuery(const uint32_t* terms, const double* weights, int64_t n);

  // The score of a record as a scan of its lists gives it: sums in float32 in the order of the
  // terms. False: the bytes are not that record's, or are damaged; `why` says how.
  bool score(const ForwardRules& rules, uint32_t number, Bytes bytes, float* out, const char** why);

 private:
  struct Wanted {
    uint32_t term;
    int64_t place;
  };
  std::vector<Wanted> wanted_;  // by term, then by place
  std::vector<float> weights_, parts_;
  std::vector<uint8_t> has_;
};

}  // namespace espnx::postings
