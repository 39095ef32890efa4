// The inner loops of MaxSim, one table per instruction set. The driver (maxsim.cpp) is common to
// all.
//
// Query tokens are packed in strips of 16: strip[k][lane] = query[lane][k], so that one row k of a
// strip is a vector of 16 query tokens, a document value is broadcast against it, and the maximum
// over document tokens is a plain vertical maximum. Document tokens are first decoded to fp32 rows
// in the L1 cache: that makes the loops independent of the format.
#pragma once

#include <cstdint>

namespace espnx {

constexpr int64_t kLanes = 16;     // query tokens of a strip
constexpr int64_t kMaxStrips = 2;  // strips that block_max takes at once
// Document tokens whose sums stay in registers, times two strips: 24 of the 32 vector registers of
// AVX-512.
constexpr int64_t kTokenTile = 12;

struct MaxsimKernels {
  // running[s * 16 + lane] = max(itself, max over the tokens of <strip s lane, token>) for
  // `n_strips` (1 or 2) adjacent strips of d rows. Returns a bit per s * 16 + lane: set where a
  // product was NaN (then `running` there is unspecified). On the way it prefetches n_tokens * d *
  // value_bytes bytes at `ahead` (any address), evenly: records are scattered, so the hardware
  // foresees little, and prefetches in one burst would hold up the loads of the sums behind them.
  uint32_t (*block_max)(const float* strips, int64_t n_strips, const float* tokens,
                        int64_t n_tokens, int64_t d, float* running, const uint8_t* ahead,
                        int64_t value_bytes);

  // The same for one query token, as dot products along d; the better one where there are too few
  // query tokens to fill a strip.
  uint32_t (*single_max)(const float* query, const float* tokens, int64_t n_tokens, int64_t d,
                         float* running);
};

extern const MaxsimKernels kMaxsimPortable;
#if defined(__x86_64__)
extern const MaxsimKernels kMaxsimAvx2;
extern const MaxsimKernels kMaxsimAvx512;
#endif

// The next tile of `remaining` document tokens: tiles are of nearly equal size, since 13 tokens are
// faster as 7 + 6 than as 12 + 1.
inline int64_t next_tile(int64_t remaining, uint32_t max_tile) {
  const uint32_t tokens = static_cast<uint32_t>(remaining),
                 tiles = (tokens + max_tile - 1) / max_tile;
  return (tokens + tiles - 1) / tiles;
}

}  // namespace espnx
