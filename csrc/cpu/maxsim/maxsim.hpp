// MaxSim (late interaction) over token rows that lie in place, scattered, in an I/O buffer:
//   scores[q][i] = sum over tokens t of query q of
//                  max over tokens j of document i of  <query[q][t], document[i][j]>
// with every product and sum in fp32. Nothing of size documents x tokens is ever stored.
#pragma once

#include <cstdint>

#include "cpu/formats/decode.hpp"
#include "cpu/formats/format.hpp"

namespace espnx {

constexpr int64_t kMaxTokens = 65535;
constexpr int64_t kMaxDim = 65536;

struct MaxsimQueries {
  const float* values;  // [n_queries, n_tokens, d], contiguous
  int64_t n_queries;
  int64_t n_tokens;
  int64_t d;  // a multiple of 8, 8..kMaxDim
};

struct MaxsimDocuments {
  const uint8_t* buffer;
  int64_t buffer_bytes;
  const int64_t* offset_bytes;  // [n] of the first token row, any alignment
  const int64_t* n_tokens;      // [n], 0..kMaxTokens
  int64_t n;
  TokenFormat format;
  MaxsimCodebook codebook;  // of residual formats
};

// The first document that does not lie wholly inside the buffer (or whose token count is out of
// range), or -1.
int64_t find_record_outside(const MaxsimDocuments& docs, int64_t d);

// Writes scores[n_queries, n]. A document without tokens scores -inf; a NaN in a document makes its
// score NaN. Uses at most `max_threads` threads, fewer where the work does not pay for them. The
// documents must have passed find_record_outside. Returns the first document that names a centroid
// which is not in the codebook, or -1; such documents score NaN.
int64_t maxsim(const MaxsimQueries& queries, const MaxsimDocuments& docs, int max_threads,
               float* scores);

}  // namespace espnx
