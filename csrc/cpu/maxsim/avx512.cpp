// MaxSim with AVX-512: a tile of 12 document tokens x 32 query tokens of sums stays in 24 of the 32
// vector registers.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.hpp"

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own header leaves the merge operand of unmasked AVX-512 intrinsics undefined on purpose,
// and warns of it here.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

// An attribute on each function, not flags for the file: nothing else compiled here may contain an
// instruction that the machine lacks.
#define ESPNX_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma,f16c")))

namespace espnx {
namespace {

// Folds kTile tokens into `running`; returns the NaN bits.
template <int kTile, int kStrips>
ESPNX_AVX512 uint32_t tile_max(const float* strips, const float* tokens, int64_t d, float* running,
                               const uint8_t* ahead, int64_t ahead_step) {
  __m512 sum[kTile][kStrips];
#pragma GCC unroll 12
  for (int t = 0; t < kTile; ++t) {
#pragma GCC unroll 2
    for (int s = 0; s < kStrips; ++s) sum[t][s] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < d; ++k) {
    __builtin_prefetch(ahead + k * ahead_step);
    __m512 query[kStrips];
#pragma GCC unroll 2
    for (int s = 0; s < kStrips; ++s) query[s] = _mm512_loadu_ps(strips + (s * d + k) * kLanes);
#pragma GCC unroll 12
    for (int t = 0; t < kTile; ++t) {
      const __m512 value = _mm512_set1_ps(tokens[t * d + k]);
#pragma GCC unroll 2
      for (int s = 0; s < kStrips; ++s) sum[t][s] = _mm512_fmadd_ps(value, query[s], sum[t][s]);
    }
  }
  uint32_t nan_bits = 0;
#pragma GCC unroll 2
  for (int s = 0; s < kStrips; ++s) {
    __m512 best = _mm512_loadu_ps(running + s * kLanes);
    __mmask16 nan = 0;
#pragma GCC unroll 12
    for (int t = 0; t < kTile; ++t) {
      // The maximum instruction drops NaNs, so they are looked for, two vectors at a time.
      if (t % 2 == 0)
        nan |= _mm512_cmp_ps_mask(sum[t][s], sum[t + 1 < kTile ? t + 1 : t][s], _CMP_UNORD_Q);
      best = _mm512_max_ps(sum[t][s], best);
    }
    _mm512_storeu_ps(running + s * kLanes, best);
    nan_bits |= static_cast<uint32_t>(nan) << (s * kLanes);
  }
  return nan_bits;
}

using TileMax = uint32_t (*)(const float*, const float*, int64_t, float*, const uint8_t*, int64_t);

template <int kStrips>
constexpr TileMax kTileMax[kTokenTile + 1] = {
    nullptr,
    tile_max<1, kStrips>,
    tile_max<2, kStrips>,
    tile_max<3, kStrips>,
    tile_max<4, kStrips>,
    tile_max<5, kStrips>,
    tile_max<6, kStrips>,
    tile_max<7, kStrips>,
    tile_max<8, kStrips>,
    tile_max<9, kStrips>,
    tile_max<10, kStrips>,
    tile_max<11, kStrips>,
    tile_max<12, kStrips>,
};

ESPNX_AVX512 uint32_t block_max(const float* strips, int64_t n_strips, const float* tokens,
                                int64_t n_tokens, int64_t d, float* running, const uint8_t* ahead,
                                int64_t value_bytes) {
  const TileMax* tile_max_of = n_strips == 2 ? kTileMax<2> : kTileMax<1>;
  uint32_t nan_bits = 0;
  while (n_tokens > 0) {
    const int64_t tile = next_tile(n_tokens, kTokenTile);
    nan_bits |= tile_max_of[tile](strips, tokens, d, running, ahead, tile * value_bytes);
    ahead += tile * d * value_bytes;
    tokens += tile * d;
    n_tokens -= tile;
  }
  return nan_bits;
}

ESPNX_AVX512 uint32_t single_max(const float* query, const float* tokens, int64_t n_tokens,
                                 int64_t d, float* running) {
  float best = *running;
  uint32_t nan = 0;
  for (int64_t j = 0; j < n_tokens; ++j, tokens += d) {
    __m512 sum0 = _mm512_setzero_ps(), sum1 = _mm512_setzero_ps();
    int64_t k = 0;
    for (; k + 32 <= d; k += 32) {
      sum0 = _mm512_fmadd_ps(_mm512_loadu_ps(query + k), _mm512_loadu_ps(tokens + k), sum0);
      sum1 =
          _mm512_fmadd_ps(_mm512_loadu_ps(query + k + 16), _mm512_loadu_ps(tokens + k + 16), sum1);
    }
    for (; k < d; k += 16) {
      const __mmask16 lanes = d - k >= 16 ? 0xFFFF : 0x00FF;  // d is a multiple of 8
      sum0 = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(lanes, query + k),
                             _mm512_maskz_loadu_ps(lanes, tokens + k), sum0);
    }
    const float product = _mm512_reduce_add_ps(_mm512_add_ps(sum0, sum1));
    nan |= product != product;
    best = product > best ? product : best;
  }
  *running = best;
  return nan;
}

}  // namespace

const MaxsimKernels kMaxsimAvx512 = {block_max, single_max};

}  // namespace espnx
#endif  // __x86_64__
