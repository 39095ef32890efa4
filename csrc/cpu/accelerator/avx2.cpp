// The accelerator with AVX2.
#if defined(__x86_64__)
#include <immintrin.h>

#include "exponential.hpp"
#include "kernels.hpp"

#define ESPNX_LEVEL __attribute__((target("avx2,fma,f16c")))

namespace espnx::accelerator {
namespace {

constexpr int kWidth = 8;
using Vec = __m256;

ESPNX_LEVEL inline Vec load_halves(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

#include "body.hpp"

}  // namespace

const Kernels kKernelsAvx2 = kTable;

}  // namespace espnx::accelerator
#endif  // __x86_64__
