// Whole-number MaxSim with AMX: one instruction multiplies 16 tokens x 64 codes by 64 bytes of 16
// query tokens. A query value is high * 256 + low; the two bytes are multiplied apart, and their
// exact sums put together.
//
// Strips are [d / 64][high, low][16 rows of 4 values][16 lanes][4]; codes are padded to a multiple
// of 64 bytes.
#if defined(__x86_64__)
#include <immintrin.h>

#include "integer.hpp"

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own header leaves the merge operand of unmasked AVX-512 intrinsics undefined on purpose,
// and warns of it here.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define ESPNX_AMX __attribute__((target("avx512f,avx512bw,avx512vl,avx2,amx-tile,amx-int8")))

namespace espnx {
namespace {

constexpr int64_t kTileRows = 16, kTileBytes = 64, kTileSize = kTileRows * kTileBytes;

int64_t blocks_of(int64_t d) { return (d + kTileBytes - 1) / kTileBytes; }
int64_t strip_bytes(int64_t d) { return blocks_of(d) * 2 * kTileSize; }
int64_t code_row_bytes(int64_t d) { return blocks_of(d) * kTileBytes; }

void pack_strip(const int16_t* rows, int64_t d, uint8_t* strip) {
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    for (int64_t k = 0; k < d; ++k) {
      const int value = rows[lane * d + k];
      const int8_t low = static_cast<int8_t>(value & 0xFF);
      uint8_t* block = strip + k / kTileBytes * 2 * kTileSize;
      const int64_t at = k % kTileBytes / 4 * kTileBytes + lane * 4 + k % 4;
      block[at] = static_cast<uint8_t>((value - low) / 256);
      block[kTileSize + at] = static_cast<uint8_t>(low);
    }
  }
}

ESPNX_AMX void unpack_int8(const uint8_t* rows, int64_t n_tokens, int64_t d, uint8_t* codes,
                           const uint8_t* ahead) {
  const int64_t row_bytes = token_row_bytes(TokenFormat::kInt8, d), pitch = code_row_bytes(d);
  for (int64_t t = 0; t < n_tokens; ++t, rows += row_bytes, ahead += row_bytes, codes += pitch) {
    for (int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(ahead + at);
    for (int64_t k = 0; k < d; k += kTileBytes) {
      const __mmask64 lanes = d - k >= kTileBytes ? ~0ull : (1ull << (d - k)) - 1;
      _mm512_storeu_si512(codes + k, _mm512_maskz_loadu_epi8(lanes, rows + kPrefixBytes + k));
    }
  }
}

ESPNX_AMX void unpack_bit1(const uint8_t* rows, int64_t n_tokens, int64_t d, uint8_t* codes,
                           const uint8_t* ahead) {
  const __m512i plus = _mm512_set1_epi8(1), minus = _mm512_set1_epi8(-1);
  const int64_t row_bytes = d / 8, pitch = code_row_bytes(d);
  for (int64_t t = 0; t < n_tokens; ++t, rows += row_bytes, ahead += row_bytes, codes += pitch) {
    __builtin_prefetch(ahead);
    for (int64_t k = 0; k < d; k += kTileBytes) {
      const __mmask16 bytes =
          d - k >= kTileBytes ? 0xFF : static_cast<__mmask16>((1u << (d - k) / 8) - 1);
      const int64_t bits = _mm_cvtsi128_si64(_mm_maskz_loadu_epi8(bytes, rows + k / 8));
      _mm512_storeu_si512(codes + k,
                          _mm512_mask_blend_epi8(static_cast<__mmask64>(bits), minus, plus));
    }
  }
}

// The intrinsics are assembly of which the compiler does not know that it reads and writes memory.
inline void memory_barrier() { asm volatile("" ::: "memory"); }

// Sums of 16 tokens against one or two strips, to sums[strip][high, low][token][lane].
template <int kStrips>
ESPNX_AMX void multiply(const uint8_t* strips, const uint8_t* codes, int64_t d, int32_t* sums) {
  const int64_t blocks = blocks_of(d), pitch = code_row_bytes(d);
  const uint8_t* second = strips + blocks * 2 * kTileSize;
  _tile_zero(0);
  _tile_zero(1);
  if (kStrips == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  memory_barrier();
  for (int64_t block = 0; block < blocks; ++block) {
    const uint8_t* query = strips + block * 2 * kTileSize;
    _tile_loadd(4, codes + block * kTileBytes, pitch);
    _tile_loadd(5, query, kTileBytes);
    _tile_dpbssd(0, 4, 5);
    _tile_loadd(6, query + kTileSize, kTileBytes);
    _tile_dpbssd(1, 4, 6);
    if (kStrips == 2) {
      query = second + block * 2 * kTileSize;
      _tile_loadd(7, query, kTileBytes);
      _tile_dpbssd(2, 4, 7);
      _tile_loadd(5, query + kTileSize, kTileBytes);
      _tile_dpbssd(3, 4, 5);
    }
  }
  constexpr int64_t kValues = kTileSize / sizeof(int32_t);
  _tile_stored(0, sums, kTileBytes);
  _tile_stored(1, sums + kValues, kTileBytes);
  if (kStrips == 2) {
    _tile_stored(2, sums + 2 * kValues, kTileBytes);
    _tile_stored(3, sums + 3 * kValues, kTileBytes);
  }
  memory_barrier();
}

ESPNX_AMX void fold(const int32_t* sums, const float* scales, int64_t n_tokens, float* running) {
  __m512 best = _mm512_loadu_ps(running);
  for (int64_t t = 0; t < n_tokens; ++t) {
    const __m512i high = _mm512_load_si512(sums + t * kLanes);
    const __m512i low = _mm512_load_si512(sums + (kTileRows + t) * kLanes);
    const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
    best = _mm512_max_ps(_mm512_mul_ps(sum, _mm512_set1_ps(scales[t])), best);
  }
  _mm512_storeu_ps(running, best);
}

ESPNX_AMX void block_max(const uint8_t* strips, int64_t n_strips, const uint8_t* codes,
                         const float* scales, int64_t n_tokens, int64_t d, float* running) {
  alignas(64) int32_t sums[2 * 2 * kTileRows * kLanes];
  for (int64_t begin = 0; begin < n_tokens; begin += kTileRows) {
    const int64_t n = n_tokens - begin < kTileRows ? n_tokens - begin : kTileRows;
    const auto multiply_strips = n_strips == 2 ? multiply<2> : multiply<1>;
    multiply_strips(strips, codes + begin * code_row_bytes(d), d, sums);
    for (int64_t s = 0; s < n_strips; ++s) {
      fold(sums + s * 2 * kTileRows * kLanes, scales + begin, n, running + s * kLanes);
    }
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

const CodeKernels kCodesAmx = {strip_bytes, code_row_bytes, pack_strip, unpack_int8,
                               unpack_bit1, block_max,      enter,      leave};

}  // namespace espnx
#endif  // __x86_64__
