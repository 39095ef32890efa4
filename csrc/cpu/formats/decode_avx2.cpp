// Decoders with AVX2.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "decode.hpp"
#include "scale.hpp"

#define ESPNX_AVX2 __attribute__((target("avx2,fma,f16c")))

namespace espnx {
namespace {

ESPNX_AVX2 bool decode_fp32(const RowDecoder& decoder, const uint8_t* rows, int64_t n_tokens,
                            float* out) {
  std::memcpy(out, rows, static_cast<size_t>(n_tokens * decoder.row_bytes));
  return true;
}

ESPNX_AVX2 inline __m128i load16(const uint8_t* bytes) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
}

ESPNX_AVX2 bool decode_fp16(const RowDecoder& decoder, const uint8_t* rows, int64_t n_tokens,
                            float* out) {
  for (int64_t i = 0; i < n_tokens * decoder.d; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(load16(rows + 2 * i)));
  return true;
}

ESPNX_AVX2 bool decode_bf16(const RowDecoder& decoder, const uint8_t* rows, int64_t n_tokens,
                            float* out) {
  for (int64_t i = 0; i < n_tokens * decoder.d; i += 8) {
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(rows + 2 * i)), 16);
    _mm256_storeu_ps(out + i, _mm256_castsi256_ps(bits));
  }
  return true;
}

ESPNX_AVX2 bool decode_int8(const RowDecoder& decoder, const uint8_t* rows, int64_t n_tokens,
                            float* out) {
  for (int64_t t = 0; t < n_tokens; ++t, rows += decoder.row_bytes, out += decoder.d) {
    const float scale = scale_at(rows, 0);
    const __m256 scales = _mm256_set1_ps(scale);
    for (int64_t k = 0; k < decoder.d; k += 8) {
      const __m128i eight =
          _mm_loadl_epi64(reinterpret_cast<const __m128i*>(rows + kPrefixBytes + k));
      _mm256_storeu_ps(out + k,
                       _mm256_mul_ps(scales, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight))));
    }
  }
  return true;
}

ESPNX_AVX2 bool decode_bit1(const RowDecoder& decoder, const uint8_t* rows, int64_t n_tokens,
                            float* out) {
  // The wanted bit of each lane goes to the sign; a set bit means plus, so what is left is turned
  // around.
  const __m256i shift = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
  const __m256 minus = _mm256_set1_ps(-decoder.sign_value), sign = _mm256_set1_ps(-0.0f);
  for (int64_t i = 0; i < n_tokens * decoder.row_bytes; ++i) {
    const __m256 bit = _mm256_castsi256_ps(_mm256_sllv_epi32(_mm256_set1_epi32(rows[i]), shift));
    _mm256_storeu_ps(out + 8 * i, _mm256_xor_ps(minus, _mm256_and_ps(bit, sign)));
  }
  return true;
}

// The weights of the 8 codes whose bits begin at `packed`.
template <int kBits>
ESPNX_AVX2 inline __m256 weights_of(const uint8_t* packed, __m256 first_weights,
                                    __m256 last_weights) {
  uint32_t bytes = 0;
  std::memcpy(&bytes, packed, kBits);
  // With the first byte as the most significant one, code i is kBits bits from bit 32 - kBits * (i
  // + 1) on.
  const __m256i word = _mm256_set1_epi32(static_cast<int>(__builtin_bswap32(bytes)));
  const __m256i order = _mm256_setr_epi32(1, 2, 3, 4, 5, 6, 7, 8);
  const __m256i shift =
      _mm256_sub_epi32(_mm256_set1_epi32(32), _mm256_mullo_epi32(order, _mm256_set1_epi32(kBits)));
  const __m256i code = _mm256_srlv_epi32(word, shift);
  // The permutation looks at the lowest three bits alone; where a code has fewer, the entries
  // repeat.
  const __m256 first = _mm256_permutevar8x32_ps(first_weights, code);
  if (kBits < 4) return first;
  const __m256 is_last = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));  // bit 3 as the sign
  return _mm256_blendv_ps(first, _mm256_permutevar8x32_ps(last_weights, code), is_last);
}

ESPNX_AVX2 inline float sum_of(__m256 values) {
  __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
  quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}

template <int kBits>
ESPNX_AVX2 bool decode_residual(const RowDecoder& decoder, const uint8_t* rows, int64_t n_tokens,
                                float* out) {
  const __m256 first = _mm256_loadu_ps(decoder.weights),
               last = _mm256_loadu_ps(decoder.weights + 8);
  for (int64_t t = 0; t < n_tokens; ++t, rows += decoder.row_bytes, out += decoder.d) {
    const float* centroid = centroid_of(decoder, rows);
    if (centroid == nullptr) return false;
    __m256 squares = _mm256_setzero_ps();
    for (int64_t k = 0; k < decoder.d; k += 8) {
      const __m256 missed = weights_of<kBits>(rows + kPrefixBytes + k * kBits / 8, first, last);
      const __m256 value = _mm256_add_ps(_mm256_loadu_ps(centroid + k), missed);
      squares = _mm256_fmadd_ps(value, value, squares);
      _mm256_storeu_ps(out + k, value);
    }
    const __m256 inverse = _mm256_set1_ps(1.0f / std::max(std::sqrt(sum_of(squares)), kTinyNorm));
    for (int64_t k = 0; k < decoder.d; k += 8) {
      _mm256_storeu_ps(out + k, _mm256_mul_ps(_mm256_loadu_ps(out + k), inverse));
    }
  }
  return true;
}

}  // namespace

const DecodeTable kDecodeAvx2 = {{decode_fp32, decode_fp16, decode_bf16, decode_int8, decode_bit1,
                                  decode_residual<1>, decode_residual<2>, decode_residual<4>}};

}  // namespace espnx
#endif  // __x86_64__
