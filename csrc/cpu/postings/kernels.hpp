// The inner loops on posting lists, one table per instruction set. The drivers (list.cpp, scan.cpp)
// are common to all.
#pragma once

#include <cstdint>

namespace espnx::postings {

// How BM25 weighs a term's count in a record, by the names that bm25s gives them.
enum class Variant : int { kRobertson = 0, kLucene, kAtire, kBm25L, kBm25Plus };
constexpr int kVariants = 5;
constexpr const char* kVariantNames[kVariants] = {"robertson", "lucene", "atire", "bm25l", "bm25+"};

struct Bm25 {
  Variant variant;
  double k1, delta;
  // By the code of a record's length: k1 (1 - b + b length / average); of bm25l without k1.
  const double* norms;
  const uint16_t* lengths;  // by record number: codes of lengths
};

struct Kernels {
  // out[i] = the i-th number of `bits` (0..32) bits at `p`. May read seven bytes behind the last
  // one.
  void (*unpack)(const uint8_t* p, int bits, int64_t n, uint32_t* out);
  // records[i] = base + i + the sum of the gaps up to it, in place; the caller knows that nothing
  // overflows.
  void (*sum_gaps)(uint32_t* gaps, int64_t n, uint32_t base);
  // out[i] = float32(idf * tf - absent) of a count values[i] in a record of records[i], in float64.
  // n <= 128.
  void (*bm25)(const Bm25& rule, const uint32_t* records, const uint32_t* values, int64_t n,
               double idf, double absent, float* out);
};

extern const Kernels kKernelsPortable;
#if defined(__x86_64__)
extern const Kernels kKernelsAvx2;
#endif

// Of the instruction set in force.
const Kernels& kernels();

}  // namespace espnx::postings
