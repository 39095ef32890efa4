// Two versions. Hardware: the SSE4.2 crc32 instruction takes 8 bytes a cycle but answers after 3
// cycles, so three independent chains run over three adjacent chunks, and carry-less multiplication
// joins them. Portable: eight table look-ups per 8 bytes.
#include "crc32c.hpp"

#include <array>
#include <cstring>

#include "cpu_level.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace espnx {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;  // reflected: bit 31 - i is the coefficient of x^i

using SliceTables = std::array<std::array<uint32_t, 256>, 8>;

// slice[k][b]: the register after byte b and k zero bytes, from a zero register.
SliceTables make_slice_tables() {
  SliceTables slice{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t c = b;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ ((c & 1) ? kPolynomial : 0);
    slice[0][b] = c;
  }
  for (int k = 1; k < 8; ++k) {
    for (uint32_t b = 0; b < 256; ++b) {
      slice[k][b] = (slice[k - 1][b] >> 8) ^ slice[0][slice[k - 1][b] & 0xFF];
    }
  }
  return slice;
}

uint32_t update_portable(uint32_t state, const uint8_t* p, size_t size) {
  static const SliceTables slice = make_slice_tables();
  // Bytes are put together by shifts, so the result does not depend on the machine's byte order.
  for (; size >= 8; p += 8, size -= 8) {
    state ^= static_cast<uint32_t>(p[0]) | static_cast<uint32_t>(p[1]) << 8 |
             static_cast<uint32_t>(p[2]) << 16 | static_cast<uint32_t>(p[3]) << 24;
    state = slice[7][state & 0xFF] ^ slice[6][(state >> 8) & 0xFF] ^
            slice[5][(state >> 16) & 0xFF] ^ slice[4][state >> 24] ^ slice[3][p[4]] ^
            slice[2][p[5]] ^ slice[1][p[6]] ^ slice[0][p[7]];
  }
  for (; size > 0; ++p, --size) state = (state >> 8) ^ slice[0][(state ^ *p) & 0xFF];
  return state;
}

#if defined(__x86_64__)
#define ESPNX_TARGET_CRC __attribute__((target("sse4.2,pclmul")))

constexpr size_t kChains = 3;
constexpr size_t kMaxChainWords =
    1024;  // 3 x 8 KiB a round: joining costs under 1 % and the data stay in the L1 cache

// shift[w] = x^(64 w - 33) mod P. A register c times shift[w] (carry-less), put through crc32_u64,
// is c followed by w zero words: the reflected product stands for c * shift[w] * x, and the
// instruction multiplies by x^32.
using ShiftTable = std::array<uint32_t, 2 * kMaxChainWords + 1>;

ESPNX_TARGET_CRC ShiftTable make_shift_table() {
  ShiftTable shift{};
  shift[1] = 1;  // x^31
  for (size_t w = 2; w < shift.size(); ++w)
    shift[w] = static_cast<uint32_t>(_mm_crc32_u64(shift[w - 1], 0));
  return shift;
}

ESPNX_TARGET_CRC inline uint64_t append_zero_words(uint64_t state, uint32_t shift) {
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<int64_t>(state)),
                                               _mm_cvtsi64_si128(static_cast<int64_t>(shift)), 0);
  return _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(product)));
}

inline uint64_t load_word(const uint8_t* p) {
  uint64_t word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

ESPNX_TARGET_CRC uint32_t update_hardware(uint32_t state32, const uint8_t* p, size_t size) {
  static const ShiftTable shift = make_shift_table();
  uint64_t state = state32;
  while (size >= kChains * 16 * 8) {  // below 16 words a chain, joining costs more than it saves
    const size_t words =
        size / (kChains * 8) < kMaxChainWords ? size / (kChains * 8) : kMaxChainWords;
    const uint8_t *second = p + words * 8, *third = second + words * 8;
    uint64_t state2 = 0, state3 = 0;
    for (size_t i = 0; i < words * 8; i += 8) {
      state = _mm_crc32_u64(state, load_word(p + i));
      state2 = _mm_crc32_u64(state2, load_word(second + i));
      state3 = _mm_crc32_u64(state3, load_word(third + i));
    }
    state = append_zero_words(state, shift[2 * words]) ^ append_zero_words(state2, shift[words]) ^
            state3;
    p += kChains * words * 8;
    size -= kChains * words * 8;
  }
  for (; size >= 8; p += 8, size -= 8) state = _mm_crc32_u64(state, load_word(p));
  uint32_t tail = static_cast<uint32_t>(state);
  for (; size > 0; ++p, --size) tail = _mm_crc32_u8(tail, *p);
  return tail;
}

bool hardware_available() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
}
#endif

}  // namespace

uint32_t crc32c(uint32_t crc, const void* data, size_t size) {
  const auto* bytes = static_cast<const uint8_t*>(data);
#if defined(__x86_64__)
  static const bool hardware = hardware_available();
  if (hardware && cpu_level() != CpuLevel::kPortable) return ~update_hardware(~crc, bytes, size);
#endif
  return ~update_portable(~crc, bytes, size);
}

}  // namespace espnx
