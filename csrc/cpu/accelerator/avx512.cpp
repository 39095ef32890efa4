// The accelerator with AVX-512.
#if defined(__x86_64__)
#include <immintrin.h>

#include "exponential.hpp"
#include "kernels.hpp"

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own header leaves the merge operand of unmasked AVX-512 intrinsics undefined on purpose,
// and warns of it here.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define ESPNX_LEVEL __attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma,f16c")))

namespace espnx::accelerator {
namespace {

constexpr int kWidth = 16;
using Vec = __m512;

ESPNX_LEVEL inline Vec load_halves(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

#include "body.hpp"

}  // namespace

const Kernels kKernelsAvx512 = kTable;

}  // namespace espnx::accelerator
#endif  // __x86_64__
