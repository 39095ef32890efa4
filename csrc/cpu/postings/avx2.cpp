// Posting lists with AVX2: eight numbers unpacked by a gather, a shift of each and a mask; prefix
// sums of eight.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "kernels.hpp"
#include "list.hpp"

#define ESPNX_LEVEL __attribute__((target("avx2")))

namespace espnx::postings {
namespace {

#include "body.hpp"

// Wider numbers may begin at a bit from which a word of 32 does not reach their end.
constexpr int kMaxGatherBits = 25;

ESPNX_LEVEL void unpack(const uint8_t* p, int bits, int64_t n, uint32_t* out) {
  if (bits == 0) {
    std::memset(out, 0, n * sizeof(uint32_t));
    return;
  }
  if (bits > kMaxGatherBits || n < 8) return kKernelsPortable.unpack(p, bits, n, out);
  const __m256i lane_bits =
      _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(bits));
  const __m256i lane_bytes = _mm256_srli_epi32(lane_bits, 3);
  const __m256i shift = _mm256_and_si256(lane_bits, _mm256_set1_epi32(7));
  const __m256i mask = _mm256_set1_epi32(static_cast<int>((uint32_t{1} << bits) - 1));
  int64_t i = 0;
  for (; i + 8 <= n; i += 8, p += bits) {  // eight numbers take `bits` bytes
    const __m256i words = _mm256_i32gather_epi32(reinterpret_cast<const int*>(p), lane_bytes, 1);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                        _mm256_and_si256(_mm256_srlv_epi32(words, shift), mask));
  }
  if (i < n) kKernelsPortable.unpack(p, bits, n - i, out + i);
}

ESPNX_LEVEL void sum_gaps(uint32_t* gaps, int64_t n, uint32_t base) {
  __m256i carry = _mm256_set1_epi32(static_cast<int>(base - 1));
  const __m256i one = _mm256_set1_epi32(1), last = _mm256_set1_epi32(7);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    auto* at = reinterpret_cast<__m256i*>(gaps + i);
    __m256i x = _mm256_add_epi32(_mm256_loadu_si256(at), one);
    x = _mm256_add_epi32(x, _mm256_slli_si256(x, 4));
    x = _mm256_add_epi32(x, _mm256_slli_si256(x, 8));
    const __m256i low = _mm256_permute2x128_si256(x, x, 0x08);  // zeros below, the lower half above
    x = _mm256_add_epi32(x, _mm256_shuffle_epi32(low, 0xff));
    x = _mm256_add_epi32(x, carry);
    _mm256_storeu_si256(at, x);
    carry = _mm256_permutevar8x32_epi32(x, last);
  }
  if (i < n) kKernelsPortable.sum_gaps(gaps + i, n - i, i > 0 ? gaps[i - 1] + 1 : base);
}

}  // namespace

const Kernels kKernelsAvx2 = {unpack, sum_gaps, bm25};

}  // namespace espnx::postings
#endif
