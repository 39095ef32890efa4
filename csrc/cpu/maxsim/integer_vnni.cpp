// Whole-number MaxSim with AVX-512 VNNI: one instruction multiplies two 16-bit query values by two
// codes in each of 16 lanes, twice what an fp32 one does. Strips are [d / 2][16 lanes][2]; codes
// are widened to 16 bits.
#if defined(__x86_64__)
#include <immintrin.h>

#include "integer.hpp"

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own header leaves the merge operand of unmasked AVX-512 intrinsics undefined on purpose,
// and warns of it here.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define ESPNX_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx2")))

namespace espnx {
namespace {

constexpr int64_t kPairBytes = 2 * sizeof(int16_t);

int64_t strip_bytes(int64_t d) { return d / 2 * kLanes * kPairBytes; }
int64_t code_row_bytes(int64_t d) { return d * static_cast<int64_t>(sizeof(int16_t)); }

void pack_strip(const int16_t* rows, int64_t d, uint8_t* strip) {
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    for (int64_t k = 0; k < d; k += 2) {
      std::memcpy(strip + (k / 2 * kLanes + lane) * kPairBytes, rows + lane * d + k, kPairBytes);
    }
  }
}

ESPNX_VNNI void unpack_int8(const uint8_t* rows, int64_t n_tokens, int64_t d, uint8_t* codes,
                            const uint8_t* ahead) {
  const int64_t row_bytes = token_row_bytes(TokenFormat::kInt8, d);
  for (int64_t t = 0; t < n_tokens; ++t, rows += row_bytes, ahead += row_bytes, codes += 2 * d) {
    for (int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(ahead + at);
    for (int64_t k = 0; k < d; k += 32) {
      const __mmask32 lanes = d - k >= 32 ? 0xFFFFFFFFu : (1u << (d - k)) - 1;
      const __m256i bytes = _mm256_maskz_loadu_epi8(lanes, rows + kPrefixBytes + k);
      _mm512_mask_storeu_epi16(codes + 2 * k, lanes, _mm512_cvtepi8_epi16(bytes));
    }
  }
}

ESPNX_VNNI void unpack_bit1(const uint8_t* rows, int64_t n_tokens, int64_t d, uint8_t* codes,
                            const uint8_t* ahead) {
  const __m128i plus = _mm_set1_epi16(1), minus = _mm_set1_epi16(-1);
  const int64_t n_bytes = n_tokens * d / 8;
  for (int64_t i = 0; i < n_bytes; ++i) {
    if (i % 64 == 0) __builtin_prefetch(ahead + i);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + 16 * i),
                     _mm_mask_blend_epi16(rows[i], minus, plus));
  }
}

template <int kTile, int kStrips>
ESPNX_VNNI void tile_max(const uint8_t* strips, const uint8_t* codes, const float* scales,
                         int64_t d, float* running) {
  const int64_t pairs = d / 2;
  __m512i sum[kTile][kStrips];
#pragma GCC unroll 12
  for (int t = 0; t < kTile; ++t) {
#pragma GCC unroll 2
    for (int s = 0; s < kStrips; ++s) sum[t][s] = _mm512_setzero_si512();
  }
  for (int64_t k = 0; k < pairs; ++k) {
    __m512i query[kStrips];
#pragma GCC unroll 2
    for (int s = 0; s < kStrips; ++s)
      query[s] = _mm512_loadu_si512(strips + (s * pairs + k) * kLanes * kPairBytes);
#pragma GCC unroll 12
    for (int t = 0; t < kTile; ++t) {
      int32_t pair;
      std::memcpy(&pair, codes + (t * pairs + k) * kPairBytes, sizeof(pair));
      const __m512i both = _mm512_set1_epi32(pair);
#pragma GCC unroll 2
      for (int s = 0; s < kStrips; ++s) sum[t][s] = _mm512_dpwssd_epi32(sum[t][s], both, query[s]);
    }
  }
#pragma GCC unroll 2
  for (int s = 0; s < kStrips; ++s) {
    __m512 best = _mm512_loadu_ps(running + s * kLanes);
#pragma GCC unroll 12
    for (int t = 0; t < kTile; ++t) {
      best = _mm512_max_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum[t][s]), _mm512_set1_ps(scales[t])),
                           best);
    }
    _mm512_storeu_ps(running + s * kLanes, best);
  }
}

using TileMax = void (*)(const uint8_t*, const uint8_t*, const float*, int64_t, float*);

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

ESPNX_VNNI void block_max(const uint8_t* strips, int64_t n_strips, const uint8_t* codes,
                          const float* scales, int64_t n_tokens, int64_t d, float* running) {
  const TileMax* tile_max_of = n_strips == 2 ? kTileMax<2> : kTileMax<1>;
  while (n_tokens > 0) {
    const int64_t tile = next_tile(n_tokens, kTokenTile);
    tile_max_of[tile](strips, codes, scales, d, running);
    codes += tile * code_row_bytes(d);
    scales += tile;
    n_tokens -= tile;
  }
}

void nothing() {}

}  // namespace

const CodeKernels kCodesVnni = {strip_bytes, code_row_bytes, pack_strip, unpack_int8,
                                unpack_bit1, block_max,      nothing,    nothing};

}  // namespace espnx
#endif  // __x86_64__
