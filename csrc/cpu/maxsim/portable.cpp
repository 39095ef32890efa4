// MaxSim in plain C++: what runs where there is no AVX2, and the easiest version to read.
#include "kernels.hpp"

namespace espnx {
namespace {

constexpr int kTileOfPortable = 2;

template <int kTile>
uint32_t tile_max(const float* strip, const float* tokens, int64_t d, float* running) {
  float sum[kTile][kLanes] = {};
  for (int64_t k = 0; k < d; ++k) {
    for (int t = 0; t < kTile; ++t) {
      const float value = tokens[t * d + k];
      for (int lane = 0; lane < kLanes; ++lane) sum[t][lane] += value * strip[k * kLanes + lane];
    }
  }
  uint32_t nan_bits = 0;
  for (int t = 0; t < kTile; ++t) {
    for (int lane = 0; lane < kLanes; ++lane) {
      nan_bits |= static_cast<uint32_t>(sum[t][lane] != sum[t][lane]) << lane;
      running[lane] = sum[t][lane] > running[lane] ? sum[t][lane] : running[lane];
    }
  }
  return nan_bits;
}

uint32_t block_max(const float* strips, int64_t n_strips, const float* tokens, int64_t n_tokens,
                   int64_t d, float* running, const uint8_t* /*ahead*/, int64_t /*value_bytes*/) {
  uint32_t nan_bits = 0;
  while (n_tokens > 0) {
    const int64_t tile = next_tile(n_tokens, kTileOfPortable);
    for (int64_t s = 0; s < n_strips; ++s) {
      const auto fold = tile == kTileOfPortable ? tile_max<kTileOfPortable> : tile_max<1>;
      nan_bits |= fold(strips + s * d * kLanes, tokens, d, running + s * kLanes) << (s * kLanes);
    }
    tokens += tile * d;
    n_tokens -= tile;
  }
  return nan_bits;
}

uint32_t single_max(const float* query, const float* tokens, int64_t n_tokens, int64_t d,
                    float* running) {
  constexpr int kChains = 8;  // d is a multiple of 8
  float best = *running;
  uint32_t nan = 0;
  for (int64_t j = 0; j < n_tokens; ++j, tokens += d) {
    float sum[kChains] = {};
    for (int64_t k = 0; k < d; k += kChains) {
      for (int c = 0; c < kChains; ++c) sum[c] += query[k + c] * tokens[k + c];
    }
    const float product =
        ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
    nan |= product != product;
    best = product > best ? product : best;
  }
  *running = best;
  return nan;
}

}  // namespace

const MaxsimKernels kMaxsimPortable = {block_max, single_max};

}  // namespace espnx
