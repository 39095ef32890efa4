// Distances with AVX2: whole numbers as 16 products of 16 bits an instruction, others as 8 fused
// ones.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.hpp"

#define ESPNX_LEVEL __attribute__((target("avx2,fma,f16c")))

namespace espnx {
namespace {

ESPNX_LEVEL inline int32_t sum_of(__m256i lanes) {
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, _MM_SHUFFLE(1, 0, 3, 2)));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, _MM_SHUFFLE(2, 3, 0, 1)));
  return _mm_cvtsi128_si32(sum);
}

ESPNX_LEVEL inline float sum_of(__m256 lanes) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

// The last `n_bytes` of a vector, and zeros: nothing behind it is read.
ESPNX_LEVEL inline __m128i last_bytes(const uint8_t* p, int64_t n_bytes) {
  alignas(16) uint8_t bytes[16] = {};
  std::memcpy(bytes, p, n_bytes);
  return _mm_load_si128(reinterpret_cast<const __m128i*>(bytes));
}

template <bool kIsSigned>
struct Whole {
  using Value = __m256i;
  using Sum = __m256i;
  static constexpr int64_t kStep = 16, kValueBytes = 1;

  ESPNX_LEVEL static inline Value widen(__m128i bytes) {
    return kIsSigned ? _mm256_cvtepi8_epi16(bytes) : _mm256_cvtepu8_epi16(bytes);
  }
  ESPNX_LEVEL static inline Value query(const void* q, int64_t k) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const int16_t*>(q) + k));
  }
  ESPNX_LEVEL static inline Value load(const uint8_t* row, int64_t k) {
    return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + k)));
  }
  ESPNX_LEVEL static inline Value some(const uint8_t* row, int64_t k, int64_t n) {
    return widen(last_bytes(row + k, n));
  }
  ESPNX_LEVEL static inline Value sub(Value a, Value b) { return _mm256_sub_epi16(a, b); }
  ESPNX_LEVEL static inline Sum dot(Sum sum, Value a, Value b) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
  }
  ESPNX_LEVEL static inline Sum zero() { return _mm256_setzero_si256(); }
  ESPNX_LEVEL static inline int32_t total(Sum sum) { return sum_of(sum); }
};

template <VectorFormat kFormat>
struct Real {
  using Value = __m256;
  using Sum = __m256;
  static constexpr int64_t kStep = 8, kValueBytes = value_bytes(kFormat);

  // Of 16 bits. bf16 is the upper half of fp32.
  ESPNX_LEVEL static inline Value widen(__m128i halves) {
    if (kFormat == VectorFormat::kFp16) return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  ESPNX_LEVEL static inline Value query(const void* q, int64_t k) {
    return _mm256_loadu_ps(static_cast<const float*>(q) + k);
  }
  ESPNX_LEVEL static inline Value load(const uint8_t* row, int64_t k) {
    if (kValueBytes == 2)
      return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * k)));
    return _mm256_loadu_ps(reinterpret_cast<const float*>(row + 4 * k));
  }
  ESPNX_LEVEL static inline Value some(const uint8_t* row, int64_t k, int64_t n) {
    if (kValueBytes == 2) return widen(last_bytes(row + 2 * k, 2 * n));
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i wanted = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lane);
    return _mm256_maskload_ps(reinterpret_cast<const float*>(row + 4 * k), wanted);
  }
  ESPNX_LEVEL static inline Value sub(Value a, Value b) { return _mm256_sub_ps(a, b); }
  ESPNX_LEVEL static inline Sum dot(Sum sum, Value a, Value b) {
    return _mm256_fmadd_ps(a, b, sum);
  }
  ESPNX_LEVEL static inline Sum zero() { return _mm256_setzero_ps(); }
  ESPNX_LEVEL static inline float total(Sum sum) { return sum_of(sum); }
};

#include "body.hpp"

}  // namespace

const DistanceTable kDistancesAvx2 = {
    {{kL2Of<Whole<false>>, kIpOf<Whole<false>>},
     {kL2Of<Whole<true>>, kIpOf<Whole<true>>},
     {kL2Of<Real<VectorFormat::kFp16>>, kIpOf<Real<VectorFormat::kFp16>>},
     {kL2Of<Real<VectorFormat::kFp32>>, kIpOf<Real<VectorFormat::kFp32>>},
     {kL2Of<Real<VectorFormat::kBf16>>, kIpOf<Real<VectorFormat::kBf16>>}}};

}  // namespace espnx
#endif  // __x86_64__
