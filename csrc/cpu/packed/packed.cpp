// Decodes pages of four bits. The loops are written once; the compiler makes vectors of them for
// each instruction set.
#include "packed.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/cpu_level.hpp"
#include "cpu/formats/half.hpp"

namespace espnx {
namespace {

#define ESPNX_INLINE inline __attribute__((always_inline))

float half_at(const uint8_t* bytes, int64_t i) {
  uint16_t half;
  std::memcpy(&half, bytes + 2 * i, sizeof(half));
  return half_to_float(half);
}

// `n` channels of two tokens, each channel with a step and a least value of its own.
ESPNX_INLINE void by_channel(const uint8_t* __restrict codes, int64_t n,
                             const float* __restrict step, const float* __restrict least,
                             float* __restrict first, float* __restrict second) {
  for (int64_t c = 0; c < n; ++c) {
    const int32_t both = codes[c];
    first[c] = static_cast<float>(both & 15) * step[c] + least[c];
    second[c] = static_cast<float>(both >> 4) * step[c] + least[c];
  }
}

// The same where a token's channels share them.
ESPNX_INLINE void by_token(const uint8_t* __restrict codes, int64_t n, const float step[2],
                           const float least[2], float* __restrict first,
                           float* __restrict second) {
  const float step_0 = step[0], step_1 = step[1], least_0 = least[0], least_1 = least[1];
  for (int64_t c = 0; c < n; ++c) {
    const int32_t both = codes[c];
    first[c] = static_cast<float>(both & 15) * step_0 + least_0;
    second[c] = static_cast<float>(both >> 4) * step_1 + least_1;
  }
}

ESPNX_INLINE void unpack(const uint8_t* page, int64_t d, int64_t dv, float* k, float* v,
                         const float* step, const float* least) {
  const uint8_t* codes = page + 4 * d;
  for (int64_t t = 0; t < kPackedRows; t += 2, codes += d)
    by_channel(codes, d, step, least, k + t * d, k + (t + 1) * d);
  const int64_t groups = packed_groups(dv);
  const uint8_t *steps = codes, *leasts = steps + 2 * kPackedRows * groups;
  codes = leasts + 2 * kPackedRows * groups;
  for (int64_t t = 0; t < kPackedRows; t += 2, codes += dv) {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t from = g * kPackedChannels, n = std::min(kPackedChannels, dv - from);
      const float step_of[] = {half_at(steps, t * groups + g),
                               half_at(steps, (t + 1) * groups + g)};
      const float least_of[] = {half_at(leasts, t * groups + g),
                                half_at(leasts, (t + 1) * groups + g)};
      by_token(codes + from, n, step_of, least_of, v + t * dv + from, v + (t + 1) * dv + from);
    }
  }
}

using Unpack = void (*)(const uint8_t*, int64_t, int64_t, float*, float*, const float*,
                        const float*);

void unpack_portable(const uint8_t* page, int64_t d, int64_t dv, float* k, float* v,
                     const float* step, const float* least) {
  unpack(page, d, dv, k, v, step, least);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void unpack_avx2(const uint8_t* page, int64_t d, int64_t dv,
                                                     float* k, float* v, const float* step,
                                                     const float* least) {
  unpack(page, d, dv, k, v, step, least);
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512"))) void
unpack_avx512(const uint8_t* page, int64_t d, int64_t dv, float* k, float* v, const float* step,
              const float* least) {
  unpack(page, d, dv, k, v, step, least);
}
#endif

Unpack in_force() {
#if defined(__x86_64__)
  switch (cpu_level()) {
    case CpuLevel::kAmx:
    case CpuLevel::kVnni:
    case CpuLevel::kAvx512: return unpack_avx512;
    case CpuLevel::kAvx2: return unpack_avx2;
    case CpuLevel::kPortable: break;
  }
#endif
  return unpack_portable;
}

}  // namespace

void unpack_page(const uint8_t* page, int64_t d, int64_t dv, float* k, float* v) {
  thread_local std::vector<float> scales;
  if (static_cast<int64_t>(scales.size()) < 2 * d) scales.resize(2 * d);
  float *step = scales.data(), *least = step + d;
  for (int64_t c = 0; c < d; ++c) step[c] = half_at(page, c), least[c] = half_at(page, d + c);
  in_force()(page, d, dv, k, v, step, least);
}

}  // namespace espnx
