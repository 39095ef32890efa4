// Posting lists in plain C++: what the other levels must equal, bit for bit.
#include <cstring>

#include "kernels.hpp"
#include "list.hpp"

#define ESPNX_LEVEL

namespace espnx::postings {
namespace {

#include "body.hpp"

void unpack(const uint8_t* p, int bits, int64_t n, uint32_t* out) {
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  for (int64_t i = 0, at = 0; i < n; ++i, at += bits) {
    uint64_t word;
    std::memcpy(&word, p + at / 8, sizeof(word));
    out[i] = static_cast<uint32_t>(word >> (at % 8) & mask);
  }
}

void sum_gaps(uint32_t* gaps, int64_t n, uint32_t base) {
  for (int64_t i = 0; i < n; ++i) {
    gaps[i] += base;
    base = gaps[i] + 1;
  }
}

}  // namespace

const Kernels kKernelsPortable = {unpack, sum_gaps, bm25};

}  // namespace espnx::postings
