// MaxSim of int8 and bit1 rows in whole numbers, for processors that sum products of them faster
// than fp32.
//
// A query token is rounded once to whole numbers of 16 bits: q = step * Q, |Q| <= 32639, step =
// max|q| / 32639. The sum over d of Q times a document's codes is exact in int32 (d <= 512), and
// only then becomes fp32:
//   <q, d> = step * (scale of the document's token * sum).
// So every instruction set gives the same bits, and a product differs from fp32's by no more than
// half a step for each value, 2^-16 of the query token's largest one (docs/tolerances.md).
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/aligned.hpp"
#include "kernels.hpp"
#include "maxsim.hpp"

namespace espnx {

// Q is high * 256 + low with both in int8: AMX multiplies the two bytes apart.
constexpr int32_t kQuerySteps = 32639;
constexpr int64_t kCodeDimMax = 512;  // 32639 * 128 * 512 < 2^31
// Tokens unpacked at a time: a multiple of the 16 rows of an AMX tile and of the 12 tokens of a
// VNNI tile.
constexpr int64_t kCodeChunk = 48;

struct CodeKernels {
  // Bytes of a packed strip of 16 query tokens, and of a row of unpacked codes.
  int64_t (*strip_bytes)(int64_t d);
  int64_t (*code_row_bytes)(int64_t d);
  // Packs whole numbers [16, d] into a strip whose bytes are zero.
  void (*pack_strip)(const int16_t* rows, int64_t d, uint8_t* strip);
  // Unpacks the codes of n_tokens rows (without their scales) of an int8 and of a bit1 document;
  // each row read asks for the bytes at the same place from `ahead`.
  void (*unpack_int8)(const uint8_t* rows, int64_t n_tokens, int64_t d, uint8_t* codes,
                      const uint8_t* ahead);
  void (*unpack_bit1)(const uint8_t* rows, int64_t n_tokens, int64_t d, uint8_t* codes,
                      const uint8_t* ahead);
  // running[s * 16 + lane] = max(itself, max over the tokens of scale * sum) for n_strips (1 or 2)
  // adjacent strips; n_tokens <= kCodeChunk.
  void (*block_max)(const uint8_t* strips, int64_t n_strips, const uint8_t* codes,
                    const float* scales, int64_t n_tokens, int64_t d, float* running);
  // Around all calls of block_max in a thread.
  void (*enter)();
  void (*leave)();
};

#if defined(__x86_64__)
extern const CodeKernels kCodesVnni;
extern const CodeKernels kCodesAmx;
#endif

// The queries as whole numbers, packed. `usable` is false where they cannot be (d too large, a NaN,
// an infinity, values near the ends of fp32's range), or need not be (few tokens, an instruction
// set or format without such kernels): then the fp32 path is taken.
class CodeQueries {
 public:
  CodeQueries(const MaxsimQueries& queries, TokenFormat format);

  const uint8_t* strip(int64_t query, int64_t s) const {
    return reinterpret_cast<const uint8_t*>(packed_.data()) +
           (query * strips + s) * kernels->strip_bytes(source.d);
  }
  float step(int64_t query, int64_t t) const {
    return steps_[static_cast<size_t>(query * source.n_tokens + t)];
  }

  const MaxsimQueries source;
  const TokenFormat format;
  const int64_t strips;
  const CodeKernels* kernels;
  bool usable = false;

 private:
  bool round_strip(int64_t query, int64_t s, int16_t* rows);

  AlignedFloats packed_;
  std::vector<float> steps_;  // [n_queries, n_tokens]
};

// One thread's buffers for scoring documents.
class CodeScorer {
 public:
  explicit CodeScorer(const CodeQueries& queries);

  // Folds n_tokens rows into running[n_queries, strips * 16]; `ahead` is what will be read next.
  // False, and `running` is unspecified, where a scale is no ordinary number.
  bool fold(const uint8_t* rows, int64_t n_tokens, const uint8_t* ahead, float* running);

 private:
  const CodeQueries& queries_;
  const int64_t row_bytes_;
  const float sign_value_;
  AlignedFloats codes_;  // bytes, [kCodeChunk] rows
  AlignedFloats scales_;
};

}  // namespace espnx
