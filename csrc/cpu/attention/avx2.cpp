// Attention with AVX2: blocks of 2 x 4, 4 x 2 and 6 x 2 sums stay in the 16 vector registers.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cfloat>
#include <cmath>
#include <cstring>

#include "cpu/formats/scale.hpp"
#include "kernels.hpp"

#define ESPNX_LEVEL __attribute__((target("avx2,fma,f16c")))

namespace espnx {
namespace {

using Vec = __m256;
constexpr int kWidth = 8, kScoreQueries = 2, kRowTile = 6, kSumVectors = 8;
constexpr bool kIsFused = true;

ESPNX_LEVEL inline Vec v_set1(float value) { return _mm256_set1_ps(value); }
ESPNX_LEVEL inline Vec v_load(const float* p) { return _mm256_loadu_ps(p); }
ESPNX_LEVEL inline void v_store(float* p, Vec a) { _mm256_storeu_ps(p, a); }
ESPNX_LEVEL inline Vec v_add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
ESPNX_LEVEL inline Vec v_sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
ESPNX_LEVEL inline Vec v_mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
ESPNX_LEVEL inline Vec v_div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
ESPNX_LEVEL inline Vec v_signed_as(
    Vec a, Vec sign) {  // a, which is not negative, with the sign of the other
  return _mm256_or_ps(a, _mm256_and_ps(_mm256_set1_ps(-0.0f), sign));
}
ESPNX_LEVEL inline Vec v_fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
ESPNX_LEVEL inline Vec v_max(Vec a, Vec b) { return _mm256_max_ps(a, b); }  // b where either is NaN
ESPNX_LEVEL inline Vec v_round(Vec a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// d is a multiple of 8: a row has no half vector. The body asks for these where vectors are wider.
ESPNX_LEVEL inline Vec v_load_half(const float* p) { return v_load(p); }
ESPNX_LEVEL inline void v_store_half(float* p, Vec a) { v_store(p, a); }

// a * 2^power, power from -126 to 0. A NaN in `a` stays one.
ESPNX_LEVEL inline Vec v_scale(Vec a, Vec power) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
  return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

// `value`, but 0 where x < limit; a NaN is not below anything.
ESPNX_LEVEL inline Vec v_zero_below(Vec x, Vec limit, Vec value) {
  return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ), value);
}

// The sums of four vectors' lanes, side by side.
ESPNX_LEVEL inline void v_sum4(Vec a, Vec b, Vec c, Vec d, float* out) {
  const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}

ESPNX_LEVEL inline float v_sum(Vec a) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

ESPNX_LEVEL inline float v_largest(Vec a) {
  __m128 best = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  best = _mm_max_ps(best, _mm_movehl_ps(best, best));
  return _mm_cvtss_f32(_mm_max_ss(best, _mm_movehdup_ps(best)));
}

template <RowFormat kFormat>
ESPNX_LEVEL inline Vec v_decode(const uint8_t* row, int64_t k) {
  if (kFormat == RowFormat::fp32)
    return _mm256_castsi256_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 4 * k)));
  if (kFormat == RowFormat::int8) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + k))));
  }
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * k));
  if (kFormat == RowFormat::fp16) return _mm256_cvtph_ps(half);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

template <RowFormat kFormat>
ESPNX_LEVEL inline Vec v_decode_half(const uint8_t* row, int64_t k) {
  return v_decode<kFormat>(row, k);
}

#include "body.hpp"

}  // namespace

const AttentionKernels kAttentionAvx2 = kTable;

}  // namespace espnx
#endif  // __x86_64__
