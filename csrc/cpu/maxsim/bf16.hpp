// MaxSim of fp16 and bf16 rows on AMX, which multiplies bf16 and adds in fp32.
//
// A value is a sum of bf16 parts, 8 bits each: a bf16 value is one, fp16 two, and a query value
// three, all exactly. Products of parts are exact in fp32; the one below 2^-24 of the whole is left
// out (docs/tolerances.md).
//
// fp32 and residual rows stay with the fp32 kernels: three parts cost nearly what they gain.
#pragma once

#include <cstdint>

#include "cpu/aligned.hpp"
#include "kernels.hpp"
#include "maxsim.hpp"

namespace espnx {

constexpr int64_t kPartChunk = 16;     // tokens split at a time: the rows of a tile
constexpr int64_t kPartsAhead = 48;    // tokens between what is split and what is asked of memory
constexpr int64_t kPartDimMax = 4096;  // keeps the buffers below a few MB
constexpr int64_t kQueryParts = 3;
constexpr int64_t kPartBlock = 32;  // values of a tile's row

inline int64_t part_row_values(int64_t d) { return (d + kPartBlock - 1) / kPartBlock * kPartBlock; }
inline int64_t part_strip_values(int64_t d) { return kQueryParts * part_row_values(d) * kLanes; }

struct PartKernels {
  // Splits n_tokens rows, any address, into parts[token][part][part_row_values(d)]. False where a
  // value is not finite, or so large that sums might not be.
  using Split = bool (*)(const uint8_t* rows, int64_t n_tokens, int64_t d, uint16_t* parts);
  Split split_fp16, split_bf16;
  // Packs one part of 16 query tokens, bf16 [16, d], into a strip whose bytes are zero.
  void (*pack_part)(const uint16_t* rows, int64_t d, int64_t part, uint16_t* strip);
  // running[s * 16 + lane] = max(itself, max over n_tokens <= kPartChunk) for n_strips (1 or 2)
  // adjacent strips. On the way asks for ahead_bytes at `ahead`, any address.
  void (*block_max)(const uint16_t* strips, int64_t n_strips, const uint16_t* parts,
                    int64_t n_parts, int64_t n_tokens, int64_t d, float* running,
                    const uint8_t* ahead, int64_t ahead_bytes);
  // Around all other calls in a thread.
  void (*enter)();
  void (*leave)();
};

#if defined(__x86_64__)
extern const PartKernels kPartsAmx;
#endif

// The queries in parts, packed. `usable` is false where they cannot be or need not be, as with
// CodeQueries.
class PartQueries {
 public:
  PartQueries(const MaxsimQueries& queries, TokenFormat format);

  const uint16_t* strip(int64_t query, int64_t s) const {
    return reinterpret_cast<const uint16_t*>(packed_.data()) +
           (query * strips + s) * part_strip_values(source.d);
  }

  const MaxsimQueries source;
  const TokenFormat format;
  const int64_t strips, document_parts;
  const PartKernels* kernels;
  bool usable = false;

 private:
  AlignedFloats packed_;  // bf16, [n_queries, strips] of part_strip_values
};

// One thread's buffers for scoring documents.
class PartScorer {
 public:
  explicit PartScorer(const PartQueries& queries);

  // Folds n_tokens <= kPartChunk rows into running[n_queries, strips * 16]; `ahead` is what will be
  // read kPartsAhead tokens later. False, and `running` is unspecified, where a value is no
  // ordinary number.
  bool fold(const uint8_t* rows, int64_t n_tokens, const uint8_t* ahead, float* running);

 private:
  bool split(const uint8_t* rows, int64_t n_tokens);

  const PartQueries& queries_;
  const int64_t row_bytes_;
  AlignedFloats parts_;  // bf16, [kPartChunk, document_parts, part_row_values]
};

}  // namespace espnx
