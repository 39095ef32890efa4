// MaxSim in bf16 parts with AMX: one instruction multiplies 16 tokens x 32 values by 32 values of
// 16 query tokens and adds to fp32.
//
// Strips are [part][d / 32][16 rows of two values][16 lanes][2].
#if defined(__x86_64__)
#include <immintrin.h>

#include "bf16.hpp"
#include "ordinary.hpp"

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own header leaves the merge operand of unmasked AVX-512 intrinsics undefined on purpose,
// and warns of it here.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define ESPNX_AMX __attribute__((target("avx512f,avx512bw,avx512vl,avx2,f16c,amx-tile,amx-bf16")))

namespace espnx {
namespace {

constexpr int64_t kTileRows = 16, kTileBytes = 64, kTileHalves = kTileRows * kTileBytes / 2;

void pack_part(const uint16_t* rows, int64_t d, int64_t part, uint16_t* strip) {
  strip += part * part_row_values(d) * kLanes;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    for (int64_t k = 0; k < d; ++k) {
      strip[k / kPartBlock * kTileHalves + k % kPartBlock / 2 * 2 * kLanes + lane * 2 + k % 2] =
          rows[lane * d + k];
    }
  }
}

ESPNX_AMX inline __mmask16 lanes_from(int64_t remaining) {
  return remaining >= 16 ? 0xFFFF : remaining >= 8 ? 0x00FF : 0;  // d is a multiple of 8
}

ESPNX_AMX inline bool is_below_largest(__m512i magnitudes) {
  const __m512i largest = _mm512_castps_si512(_mm512_set1_ps(kLargestValue));
  return _mm512_cmpgt_epu32_mask(magnitudes, largest) == 0;
}

// Splits 32 values into parts of 8 bits, by truncation: the upper half of an fp32 value is a bf16
// one. `peaks` collects the largest magnitudes, as bits.
template <int kParts>
ESPNX_AMX inline void store_parts(__m512 first, __m512 second, int64_t row_values, uint16_t* out,
                                  __m512i* peaks) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u)),
                magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  const __m512i odd = _mm512_add_epi32(
      _mm512_set1_epi32(0x00030001),
      _mm512_mullo_epi32(_mm512_set1_epi32(0x00040004),
                         _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)));
  *peaks = _mm512_max_epu32(*peaks, _mm512_and_si512(_mm512_castps_si512(first), magnitude));
  *peaks = _mm512_max_epu32(*peaks, _mm512_and_si512(_mm512_castps_si512(second), magnitude));
#pragma GCC unroll 2
  for (int part = 0; part < kParts; ++part) {
    const __m512i a = _mm512_castps_si512(first), b = _mm512_castps_si512(second);
    _mm512_storeu_si512(out + part * row_values, _mm512_permutex2var_epi16(a, odd, b));
    first = _mm512_sub_ps(first, _mm512_castsi512_ps(_mm512_and_si512(a, upper)));
    second = _mm512_sub_ps(second, _mm512_castsi512_ps(_mm512_and_si512(b, upper)));
  }
}

ESPNX_AMX inline __m512 load_fp16(__mmask16 lanes, const uint8_t* values) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, values));
}

ESPNX_AMX bool split_fp16(const uint8_t* rows, int64_t n_tokens, int64_t d, uint16_t* parts) {
  const int64_t row_values = part_row_values(d);
  __m512i peaks = _mm512_setzero_si512();
  for (int64_t t = 0; t < n_tokens; ++t, rows += 2 * d, parts += 2 * row_values) {
    for (int64_t k = 0; k < d; k += kPartBlock) {
      store_parts<2>(load_fp16(lanes_from(d - k), rows + 2 * k),
                     load_fp16(lanes_from(d - k - 16), rows + 2 * k + 32), row_values, parts + k,
                     &peaks);
    }
  }
  return is_below_largest(peaks);
}

ESPNX_AMX bool split_bf16(const uint8_t* rows, int64_t n_tokens, int64_t d, uint16_t* parts) {
  const int64_t row_values = part_row_values(d);
  const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
  __m512i peaks = _mm512_setzero_si512();
  for (int64_t t = 0; t < n_tokens; ++t, rows += 2 * d, parts += row_values) {
    for (int64_t k = 0; k < d; k += kPartBlock) {
      const __mmask32 lanes = d - k >= kPartBlock ? 0xFFFFFFFFu : (1u << (d - k)) - 1;
      const __m512i values = _mm512_maskz_loadu_epi16(lanes, rows + 2 * k);
      peaks = _mm512_max_epu16(peaks, _mm512_and_si512(values, magnitude));
      _mm512_storeu_si512(parts + k, values);
    }
  }
  const __m512i largest = _mm512_srli_epi32(_mm512_castps_si512(_mm512_set1_ps(kLargestValue)), 16);
  const __m512i even = _mm512_and_si512(peaks, _mm512_set1_epi32(0xFFFF)),
                odd = _mm512_srli_epi32(peaks, 16);
  return _mm512_cmpgt_epu32_mask(_mm512_max_epu32(even, odd), largest) == 0;
}

// The intrinsics are assembly of which the compiler does not know that it reads and writes memory.
inline void memory_barrier() { asm volatile("" ::: "memory"); }

// What is prefetched while tiles are multiplied: evenly, since bursts would fill the line buffers,
// and to the second level, since the first one is full of strips and parts.
struct Ahead {
  const uint8_t* bytes;
  int64_t per_block;

  void ask(int64_t block) const {
    for (int64_t at = 0; at < per_block; at += 64)
      __builtin_prefetch(bytes + block * per_block + at, 0, 2);
  }
};

// Sums of 16 tokens against one or two strips, to sums[large, small][strip][token][lane]. Two sums
// each, of large products and of small ones: a tile waits three multiplications for the one before
// on the same sum.
template <int kParts, int kStrips>
ESPNX_AMX void multiply(const uint16_t* strips, const uint16_t* parts, int64_t d,
                        const Ahead& ahead, float* sums) {
  const int64_t row_values = part_row_values(d), blocks = row_values / kPartBlock;
  const int64_t pitch_bytes = kParts * row_values * 2;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  memory_barrier();
  for (int64_t block = 0; block < blocks; ++block) {
    const uint16_t* tokens = parts + block * kPartBlock;
    const uint16_t* query = strips + 2 * row_values * kLanes + block * kTileHalves;
    ahead.ask(block);
    _tile_loadd(4, tokens, pitch_bytes);
    _tile_loadd(6, query, kTileBytes);
    _tile_dpbf16ps(2, 4, 6);
    if (kStrips == 2) {
      _tile_loadd(7, query + part_strip_values(d), kTileBytes);
      _tile_dpbf16ps(3, 4, 7);
    }
    query -= row_values * kLanes;
    _tile_loadd(6, query, kTileBytes);
    _tile_dpbf16ps(0, 4, 6);
    if (kParts > 1) {
      _tile_loadd(5, tokens + row_values, pitch_bytes);
      _tile_dpbf16ps(2, 5, 6);
    }
    if (kStrips == 2) {
      _tile_loadd(7, query + part_strip_values(d), kTileBytes);
      _tile_dpbf16ps(1, 4, 7);
      if (kParts > 1) _tile_dpbf16ps(3, 5, 7);
    }
    query -= row_values * kLanes;
    _tile_loadd(6, query, kTileBytes);
    _tile_dpbf16ps(0, 4, 6);
    if (kParts > 1) _tile_dpbf16ps(2, 5, 6);
    if (kStrips == 2) {
      _tile_loadd(7, query + part_strip_values(d), kTileBytes);
      _tile_dpbf16ps(1, 4, 7);
      if (kParts > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  constexpr int64_t kValues = kTileRows * kLanes;
  _tile_stored(0, sums, kTileBytes);
  _tile_stored(2, sums + kStrips * kValues, kTileBytes);
  if (kStrips == 2) {
    _tile_stored(1, sums + kValues, kTileBytes);
    _tile_stored(3, sums + 3 * kValues, kTileBytes);
  }
  memory_barrier();
}

ESPNX_AMX void fold(const float* large, const float* small, int64_t n_tokens, float* running) {
  __m512 best = _mm512_loadu_ps(running);
  for (int64_t t = 0; t < n_tokens; ++t) {
    const __m512 sum =
        _mm512_add_ps(_mm512_load_ps(large + t * kLanes), _mm512_load_ps(small + t * kLanes));
    best = _mm512_max_ps(sum, best);
  }
  _mm512_storeu_ps(running, best);
}

using Multiply = void (*)(const uint16_t*, const uint16_t*, int64_t, const Ahead&, float*);
constexpr Multiply kMultiply[2][2] = {{multiply<1, 1>, multiply<1, 2>},
                                      {multiply<2, 1>, multiply<2, 2>}};

ESPNX_AMX void block_max(const uint16_t* strips, int64_t n_strips, const uint16_t* parts,
                         int64_t n_parts, int64_t n_tokens, int64_t d, float* running,
                         const uint8_t* ahead, int64_t ahead_bytes) {
  constexpr int64_t kValues = kTileRows * kLanes;
  alignas(64) float sums[2 * 2 * kValues];
  const int64_t per_block = ahead_bytes / (part_row_values(d) / kPartBlock);
  kMultiply[n_parts - 1][n_strips - 1](strips, parts, d, Ahead{ahead, per_block}, sums);
  for (int64_t s = 0; s < n_strips; ++s) {
    fold(sums + s * kValues, sums + (n_strips + s) * kValues, n_tokens, running + s * kLanes);
  }
}

ESPNX_AMX void enter() {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } const config;
  memory_barrier();
  _tile_loadconfig(&config);
}

ESPNX_AMX void leave() { _tile_release(); }

}  // namespace

const PartKernels kPartsAmx = {split_fp16, split_bf16, pack_part, block_max, enter, leave};

}  // namespace espnx
#endif  // __x86_64__
