// Decoders with AVX-512.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "decode.hpp"
#include "scale.hpp"

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own header leaves the merge operand of unmasked AVX-512 intrinsics undefined on purpose,
// and warns of it here.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define ESPNX_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma,f16c")))

namespace espnx {
namespace {

ESPNX_AVX512 bool decode_fp32(const RowDecoder& decoder, const uint8_t* rows, int64_t n_tokens,
                              float* out) {
  std::memcpy(out, rows, static_cast<size_t>(n_tokens * decoder.row_bytes));
  return true;
}

ESPNX_AVX512 bool decode_fp16(const RowDecoder& decoder, const uint8_t* rows, int64_t n_tokens,
                              float* out) {
  const int64_t n_values = n_tokens * decoder.d;
  int64_t i = 0;
  for (; i + 16 <= n_values; i += 16) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows + 2 * i));
    _mm512_storeu_ps(out + i, _mm512_cvtph_ps(half));
  }
  if (i < n_values) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + 2 * i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(half));
  }
  return true;
}

ESPNX_AVX512 bool decode_bf16(const RowDecoder& decoder, const uint8_t* rows, int64_t n_tokens,
                              float* out) {
  const int64_t n_values = n_tokens * decoder.d;
  int64_t i = 0;
  for (; i + 16 <= n_values; i += 16) {
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows + 2 * i));
    _mm512_storeu_si512(out + i, _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
  }
  if (i < n_values) {
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + 2 * i));
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(high), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), bits);
  }
  return true;
}

// d is a multiple of 8, so a row ends with a whole vector or with half of one.
ESPNX_AVX512 inline __mmask16 lanes_of(int64_t remaining) {
  return remaining >= 16 ? 0xFFFF : 0x00FF;
}

ESPNX_AVX512 bool decode_int8(const RowDecoder& decoder, const uint8_t* rows, int64_t n_tokens,
                              float* out) {
  for (int64_t t = 0; t < n_tokens; ++t, rows += decoder.row_bytes, out += decoder.d) {
    const float scale = scale_at(rows, 0);
    const __m512 scales = _mm512_set1_ps(scale);
    for (int64_t k = 0; k < decoder.d; k += 16) {
      const __mmask16 lanes = lanes_of(decoder.d - k);
      const __m512i code =
          _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, rows + kPrefixBytes + k));
      _mm512_mask_storeu_ps(out + k, lanes, _mm512_mul_ps(scales, _mm512_cvtepi32_ps(code)));
    }
  }
  return true;
}

ESPNX_AVX512 bool decode_bit1(const RowDecoder& decoder, const uint8_t* rows, int64_t n_tokens,
                              float* out) {
  const __m512 plus = _mm512_set1_ps(decoder.sign_value),
               minus = _mm512_set1_ps(-decoder.sign_value);
  const int64_t n_bytes = n_tokens * decoder.row_bytes;
  int64_t i = 0;
  for (; i + 2 <= n_bytes; i += 2) {
    uint16_t bits;
    std::memcpy(&bits, rows + i, sizeof(bits));
    _mm512_storeu_ps(out + 8 * i, _mm512_mask_blend_ps(bits, minus, plus));
  }
  if (i < n_bytes)
    _mm512_mask_storeu_ps(out + 8 * i, 0x00FF, _mm512_mask_blend_ps(rows[i], minus, plus));
  return true;
}

// The weights of 16 codes whose bits begin at `packed`, by a permutation of the 16 entries that
// hold them.
template <int kBits>
ESPNX_AVX512 inline __m512 weights_of(const uint8_t* packed, int64_t n_codes, __m512 weights) {
  // With the first byte as the most significant one, code i is kBits bits from bit 32 - kBits * (i
  // + 1) on.
  const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i word;
  __m512i place = order;
  if (kBits == 4) {
    uint32_t first, second = 0;
    std::memcpy(&first, packed, sizeof(first));
    if (n_codes > 8) std::memcpy(&second, packed + 4, sizeof(second));
    word = _mm512_mask_blend_epi32(0xFF00,
                                   _mm512_set1_epi32(static_cast<int>(__builtin_bswap32(first))),
                                   _mm512_set1_epi32(static_cast<int>(__builtin_bswap32(second))));
    place = _mm512_and_si512(order, _mm512_set1_epi32(7));
  } else {
    uint32_t bytes = 0;
    if (n_codes > 8) {
      std::memcpy(&bytes, packed, 2 * kBits);
    } else {
      std::memcpy(&bytes, packed, kBits);
    }
    word = _mm512_set1_epi32(static_cast<int>(__builtin_bswap32(bytes)));
  }
  const __m512i shift = _mm512_sub_epi32(_mm512_set1_epi32(32 - kBits),
                                         _mm512_mullo_epi32(place, _mm512_set1_epi32(kBits)));
  const __m512i code = _mm512_srlv_epi32(word, shift);
  // The permutation looks at the lowest four bits alone; where a code has fewer, the entries
  // repeat.
  return _mm512_permutexvar_ps(code, weights);
}

template <int kBits>
ESPNX_AVX512 bool decode_residual(const RowDecoder& decoder, const uint8_t* rows, int64_t n_tokens,
                                  float* out) {
  constexpr int64_t kAhead =
      4;  // rows whose centroids are asked for early: they lie all over a table of megabytes
  const __m512 weights = _mm512_loadu_ps(decoder.weights);
  const int64_t d = decoder.d;
  for (int64_t t = 0; t < n_tokens; ++t, rows += decoder.row_bytes, out += d) {
    if (t + kAhead < n_tokens) {
      const float* later = centroid_of(decoder, rows + kAhead * decoder.row_bytes);
      if (later == nullptr) return false;
      for (int64_t k = 0; k < d; k += 16) __builtin_prefetch(later + k);
    }
    const float* centroid = centroid_of(decoder, rows);
    if (centroid == nullptr) return false;
    __m512 squares = _mm512_setzero_ps();
    for (int64_t k = 0; k < d; k += 16) {
      const __mmask16 lanes = lanes_of(d - k);
      const __m512 missed = weights_of<kBits>(rows + kPrefixBytes + k * kBits / 8, d - k, weights);
      const __m512 value =
          _mm512_maskz_add_ps(lanes, _mm512_maskz_loadu_ps(lanes, centroid + k), missed);
      squares = _mm512_fmadd_ps(value, value, squares);
      _mm512_mask_storeu_ps(out + k, lanes, value);
    }
    const __m512 inverse =
        _mm512_set1_ps(1.0f / std::max(std::sqrt(_mm512_reduce_add_ps(squares)), kTinyNorm));
    for (int64_t k = 0; k < d; k += 16) {
      const __mmask16 lanes = lanes_of(d - k);
      _mm512_mask_storeu_ps(out + k, lanes,
                            _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, out + k), inverse));
    }
  }
  return true;
}

}  // namespace

const DecodeTable kDecodeAvx512 = {{decode_fp32, decode_fp16, decode_bf16, decode_int8, decode_bit1,
                                    decode_residual<1>, decode_residual<2>, decode_residual<4>}};

}  // namespace espnx
#endif  // __x86_64__
