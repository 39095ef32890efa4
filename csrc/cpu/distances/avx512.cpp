// Distances with AVX-512: whole numbers as 32 products of 16 bits an instruction, others as 16
// fused ones; the end of a vector is a masked load.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.hpp"

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own header leaves the merge operand of unmasked AVX-512 intrinsics undefined on purpose,
// and warns of it here.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define ESPNX_LEVEL __attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma,f16c")))
#define ESPNX_DOT(sum, a, b) _mm512_add_epi32(sum, _mm512_madd_epi16(a, b))

namespace espnx {
namespace {

#include "whole512.hpp"

template <VectorFormat kFormat>
struct Real {
  using Value = __m512;
  using Sum = __m512;
  static constexpr int64_t kStep = 16, kValueBytes = value_bytes(kFormat);

  // Of 16 bits. bf16 is the upper half of fp32.
  ESPNX_LEVEL static inline Value widen(__m256i halves) {
    if (kFormat == VectorFormat::kFp16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  ESPNX_LEVEL static inline Value query(const void* q, int64_t k) {
    return _mm512_loadu_ps(static_cast<const float*>(q) + k);
  }
  ESPNX_LEVEL static inline Value load(const uint8_t* row, int64_t k) {
    if (kValueBytes == 2)
      return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 2 * k)));
    return _mm512_loadu_ps(row + 4 * k);
  }
  ESPNX_LEVEL static inline Value some(const uint8_t* row, int64_t k, int64_t n) {
    const auto wanted = static_cast<__mmask16>((1u << n) - 1);
    if (kValueBytes == 2) return widen(_mm256_maskz_loadu_epi16(wanted, row + 2 * k));
    return _mm512_maskz_loadu_ps(wanted, row + 4 * k);
  }
  ESPNX_LEVEL static inline Value sub(Value a, Value b) { return _mm512_sub_ps(a, b); }
  ESPNX_LEVEL static inline Sum dot(Sum sum, Value a, Value b) {
    return _mm512_fmadd_ps(a, b, sum);
  }
  ESPNX_LEVEL static inline Sum zero() { return _mm512_setzero_ps(); }
  ESPNX_LEVEL static inline float total(Sum sum) { return _mm512_reduce_add_ps(sum); }
};

#include "body.hpp"

}  // namespace

const DistanceTable kDistancesAvx512 = {
    {{kL2Of<Whole<false>>, kIpOf<Whole<false>>},
     {kL2Of<Whole<true>>, kIpOf<Whole<true>>},
     {kL2Of<Real<VectorFormat::kFp16>>, kIpOf<Real<VectorFormat::kFp16>>},
     {kL2Of<Real<VectorFormat::kFp32>>, kIpOf<Real<VectorFormat::kFp32>>},
     {kL2Of<Real<VectorFormat::kBf16>>, kIpOf<Real<VectorFormat::kBf16>>}}};

}  // namespace espnx
#endif  // __x86_64__
