// Attention with AVX-512: blocks of 4 x 4 and 12 x 2 sums stay in the 32 vector registers.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cfloat>
#include <cmath>
#include <cstring>

#include "cpu/formats/scale.hpp"
#include "kernels.hpp"

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own header leaves the merge operand of unmasked AVX-512 intrinsics undefined on purpose,
// and warns of it here.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

// An attribute on each function, not flags for the file: nothing else compiled here may contain an
// instruction that the machine lacks.
#define ESPNX_LEVEL __attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma,f16c")))

namespace espnx {
namespace {

using Vec = __m512;
constexpr int kWidth = 16, kScoreQueries = 4, kRowTile = 12, kSumVectors = 16;
constexpr bool kIsFused = true;
constexpr __mmask16 kHalfLanes = 0x00FF;

ESPNX_LEVEL inline Vec v_set1(float value) { return _mm512_set1_ps(value); }
ESPNX_LEVEL inline Vec v_load(const float* p) { return _mm512_loadu_ps(p); }
ESPNX_LEVEL inline Vec v_load_half(const float* p) { return _mm512_maskz_loadu_ps(kHalfLanes, p); }
ESPNX_LEVEL inline void v_store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
ESPNX_LEVEL inline void v_store_half(float* p, Vec a) { _mm512_mask_storeu_ps(p, kHalfLanes, a); }
ESPNX_LEVEL inline Vec v_add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
ESPNX_LEVEL inline Vec v_sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
ESPNX_LEVEL inline Vec v_mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
ESPNX_LEVEL inline Vec v_div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
ESPNX_LEVEL inline Vec v_signed_as(
    Vec a, Vec sign) {  // a, which is not negative, with the sign of the other
  const __m512i bit = _mm512_and_epi32(_mm512_set1_epi32(INT32_MIN), _mm512_castps_si512(sign));
  return _mm512_castsi512_ps(_mm512_or_epi32(_mm512_castps_si512(a), bit));
}
ESPNX_LEVEL inline Vec v_fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
ESPNX_LEVEL inline Vec v_max(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b where either is NaN
ESPNX_LEVEL inline float v_sum(Vec a) { return _mm512_reduce_add_ps(a); }
ESPNX_LEVEL inline float v_largest(Vec a) { return _mm512_reduce_max_ps(a); }
ESPNX_LEVEL inline Vec v_round(Vec a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
ESPNX_LEVEL inline Vec v_scale(Vec a, Vec power) { return _mm512_scalef_ps(a, power); }

// `value`, but 0 where x < limit; a NaN is not below anything.
ESPNX_LEVEL inline Vec v_zero_below(Vec x, Vec limit, Vec value) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), value);
}

ESPNX_LEVEL inline __m256 halves_added(Vec a) {
  return _mm256_add_ps(_mm512_castps512_ps256(a),
                       _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1)));
}

// The sums of four vectors' lanes, side by side.
ESPNX_LEVEL inline void v_sum4(Vec a, Vec b, Vec c, Vec d, float* out) {
  const __m256 ab = _mm256_hadd_ps(halves_added(a), halves_added(b)),
               cd = _mm256_hadd_ps(halves_added(c), halves_added(d));
  const __m256 sums = _mm256_hadd_ps(ab, cd);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}

template <RowFormat kFormat>
ESPNX_LEVEL inline Vec v_decode(const uint8_t* row, int64_t k) {
  if (kFormat == RowFormat::fp32) return _mm512_loadu_ps(row + 4 * k);
  if (kFormat == RowFormat::int8) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + k))));
  }
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 2 * k));
  if (kFormat == RowFormat::fp16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

template <RowFormat kFormat>
ESPNX_LEVEL inline Vec v_decode_half(const uint8_t* row, int64_t k) {
  if (kFormat == RowFormat::fp32) return _mm512_maskz_loadu_ps(kHalfLanes, row + 4 * k);
  if (kFormat == RowFormat::int8) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + k))));
  }
  const __m256i half =
      _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * k)));
  if (kFormat == RowFormat::fp16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

#include "body.hpp"

}  // namespace

const AttentionKernels kAttentionAvx512 = kTable;

}  // namespace espnx
#endif  // __x86_64__
