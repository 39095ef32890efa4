// MaxSim with AVX2: a strip of 16 query tokens is two registers, and a tile of 6 document tokens
// keeps 12 of 16 registers busy.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.hpp"

#define ESPNX_AVX2 __attribute__((target("avx2,fma,f16c")))

namespace espnx {
namespace {

constexpr int kTileOfAvx2 = 6;

// Folds kTile tokens into the strip's `running`; returns the NaN bits.
template <int kTile>
ESPNX_AVX2 uint32_t tile_max(const float* strip, const float* tokens, int64_t d, float* running,
                             const uint8_t* ahead, int64_t ahead_step) {
  __m256 sum[kTile][2];
#pragma GCC unroll 6
  for (int t = 0; t < kTile; ++t) sum[t][0] = sum[t][1] = _mm256_setzero_ps();
  for (int64_t k = 0; k < d; ++k) {
    __builtin_prefetch(ahead + k * ahead_step);
    const __m256 query0 = _mm256_loadu_ps(strip + k * kLanes),
                 query1 = _mm256_loadu_ps(strip + k * kLanes + 8);
#pragma GCC unroll 6
    for (int t = 0; t < kTile; ++t) {
      const __m256 value = _mm256_broadcast_ss(tokens + t * d + k);
      sum[t][0] = _mm256_fmadd_ps(value, query0, sum[t][0]);
      sum[t][1] = _mm256_fmadd_ps(value, query1, sum[t][1]);
    }
  }
  uint32_t nan_bits = 0;
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    __m256 best = _mm256_loadu_ps(running + 8 * half), nan = _mm256_setzero_ps();
#pragma GCC unroll 6
    for (int t = 0; t < kTile; ++t) {
      // The maximum instruction drops NaNs, so they are looked for, two vectors at a time.
      if (t % 2 == 0) {
        nan = _mm256_or_ps(
            nan, _mm256_cmp_ps(sum[t][half], sum[t + 1 < kTile ? t + 1 : t][half], _CMP_UNORD_Q));
      }
      best = _mm256_max_ps(sum[t][half], best);
    }
    _mm256_storeu_ps(running + 8 * half, best);
    nan_bits |= static_cast<uint32_t>(_mm256_movemask_ps(nan)) << (8 * half);
  }
  return nan_bits;
}

using TileMax = uint32_t (*)(const float*, const float*, int64_t, float*, const uint8_t*, int64_t);
constexpr TileMax kTileMax[kTileOfAvx2 + 1] = {nullptr,     tile_max<1>, tile_max<2>, tile_max<3>,
                                               tile_max<4>, tile_max<5>, tile_max<6>};

ESPNX_AVX2 uint32_t block_max(const float* strips, int64_t n_strips, const float* tokens,
                              int64_t n_tokens, int64_t d, float* running, const uint8_t* ahead,
                              int64_t value_bytes) {
  uint32_t nan_bits = 0;
  while (n_tokens > 0) {
    const int64_t tile = next_tile(n_tokens, kTileOfAvx2);
    for (int64_t s = 0; s < n_strips; ++s) {
      const uint32_t nan = kTileMax[tile](strips + s * d * kLanes, tokens, d, running + s * kLanes,
                                          ahead, tile * value_bytes);
      nan_bits |= nan << (s * kLanes);
    }
    ahead += tile * d * value_bytes;
    tokens += tile * d;
    n_tokens -= tile;
  }
  return nan_bits;
}

ESPNX_AVX2 uint32_t single_max(const float* query, const float* tokens, int64_t n_tokens, int64_t d,
                               float* running) {
  float best = *running;
  uint32_t nan = 0;
  for (int64_t j = 0; j < n_tokens; ++j, tokens += d) {
    __m256 sum0 = _mm256_setzero_ps(), sum1 = _mm256_setzero_ps();
    int64_t k = 0;
    for (; k + 16 <= d; k += 16) {
      sum0 = _mm256_fmadd_ps(_mm256_loadu_ps(query + k), _mm256_loadu_ps(tokens + k), sum0);
      sum1 = _mm256_fmadd_ps(_mm256_loadu_ps(query + k + 8), _mm256_loadu_ps(tokens + k + 8), sum1);
    }
    if (k < d)
      sum0 = _mm256_fmadd_ps(_mm256_loadu_ps(query + k), _mm256_loadu_ps(tokens + k), sum0);
    sum0 = _mm256_add_ps(sum0, sum1);
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(sum0), _mm256_extractf128_ps(sum0, 1));
    quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    quarter = _mm_add_ss(quarter, _mm_movehdup_ps(quarter));
    const float product = _mm_cvtss_f32(quarter);
    nan |= product != product;
    best = product > best ? product : best;
  }
  *running = best;
  return nan;
}

}  // namespace

const MaxsimKernels kMaxsimAvx2 = {block_max, single_max};

}  // namespace espnx
#endif  // __x86_64__
