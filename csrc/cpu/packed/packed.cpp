// Makes pages of four bits, and decodes them. The loops are written once; the compiler makes
// vectors of them for each instruction set.
#include "packed.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/cpu_level.hpp"
#include "cpu/formats/half.hpp"

namespace espnx {
namespace {

#define ESPNX_INLINE inline __attribute__((always_inline))

// `n` numbers of fp16, at any address.
ESPNX_INLINE void halves(const uint8_t* bytes, int64_t n, float* __restrict to) {
  for (int64_t i = 0; i < n; ++i) {
    uint16_t half;
    std::memcpy(&half, bytes + 2 * i, sizeof(half));
    to[i] = half_to_float(half);
  }
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

// `scales`: room for the steps and least values of K's channels and of V's tokens.
ESPNX_INLINE void unpack(const uint8_t* page, int64_t d, int64_t dv, float* k, float* v,
                         float* scales) {
  const int64_t groups = packed_groups(dv), of_v = kPackedRows * groups;
  float *step = scales, *least = scales + d, *steps = scales + 2 * d, *leasts = steps + of_v;
  halves(page, 2 * d, step);
  const uint8_t* codes = page + 4 * d;
  for (int64_t t = 0; t < kPackedRows; t += 2, codes += d)
    by_channel(codes, d, step, least, k + t * d, k + (t + 1) * d);
  halves(codes, 2 * of_v, steps);
  codes += 4 * of_v;
  for (int64_t t = 0; t < kPackedRows; t += 2, codes += dv) {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t from = g * kPackedChannels, n = std::min(kPackedChannels, dv - from);
      const float step_of[] = {steps[t * groups + g], steps[(t + 1) * groups + g]};
      const float least_of[] = {leasts[t * groups + g], leasts[(t + 1) * groups + g]};
      by_token(codes + from, n, step_of, least_of, v + t * dv + from, v + (t + 1) * dv + from);
    }
  }
}

constexpr float kMostOfHalf = 65504, kCodes = 15;

// What is stored of a number: NaN becomes 0, what is beyond fp16 its largest.
ESPNX_INLINE float finite(float x) {
  x = x == x ? x : 0.0F;
  x = x > kMostOfHalf ? kMostOfHalf : x;
  return x < -kMostOfHalf ? -kMostOfHalf : x;
}

// The nearest whole number, of two the even one, of one far below 2^22.
ESPNX_INLINE float whole(float x) {
  constexpr float kShift = 12582912;  // 1.5 * 2^23: no bits are left behind the point
  return (x + kShift) - kShift;
}

ESPNX_INLINE int32_t code(float x, float step, float least) {
  float steps = step > 0 ? (x - least) / step : 0.0F;
  steps = steps > kCodes ? kCodes : steps;  // also infinity: the smallest of steps may be too small
  steps = whole(steps < 0 ? 0.0F : steps);
  return static_cast<int32_t>(steps);
}

ESPNX_INLINE void put_half(uint8_t* bytes, int64_t i, uint16_t half) {
  std::memcpy(bytes + 2 * i, &half, sizeof(half));
}

// Writes the step and the least value of numbers that reach from `least` to `most` as fp16, and
// makes both what was written.
ESPNX_INLINE void scale(uint8_t* steps, uint8_t* leasts, int64_t i, float& least, float& step,
                        float most) {
  const uint16_t half_least = float_to_half(least);
  least = half_to_float(half_least);
  const float reach = (most - least) / kCodes;
  const uint16_t half_step = float_to_half(reach > kMostOfHalf ? kMostOfHalf : reach);
  step = half_to_float(half_step);
  put_half(steps, i, half_step), put_half(leasts, i, half_least);
}

// `scales`: room for the least and the largest value of each channel, or the step.
ESPNX_INLINE void pack(const float* k, const float* v, int64_t d, int64_t dv, uint8_t* page,
                       float* scales) {
  float* __restrict least = scales;
  float* __restrict most = scales + d;
  for (int64_t c = 0; c < d; ++c) least[c] = most[c] = finite(k[c]);
  for (int64_t t = 1; t < kPackedRows; ++t) {
    const float* row = k + t * d;
    for (int64_t c = 0; c < d; ++c) {
      const float x = finite(row[c]);
      least[c] = x < least[c] ? x : least[c];
      most[c] = x > most[c] ? x : most[c];
    }
  }
  float* step = most;
  for (int64_t c = 0; c < d; ++c) scale(page, page + 2 * d, c, least[c], step[c], most[c]);
  uint8_t* __restrict codes = page + 4 * d;
  for (int64_t t = 0; t < kPackedRows; t += 2, codes += d) {
    const float *first = k + t * d, *second = first + d;
    for (int64_t c = 0; c < d; ++c) {
      codes[c] = static_cast<uint8_t>(code(finite(first[c]), step[c], least[c]) |
                                      code(finite(second[c]), step[c], least[c]) << 4);
    }
  }
  const int64_t groups = packed_groups(dv);
  uint8_t *steps = codes, *leasts = steps + 2 * kPackedRows * groups;
  codes = leasts + 2 * kPackedRows * groups;
  for (int64_t t = 0; t < kPackedRows; t += 2, codes += dv) {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t from = g * kPackedChannels, n = std::min(kPackedChannels, dv - from);
      const float* rows[] = {v + t * dv + from, v + (t + 1) * dv + from};
      float low[2], high[2];
      for (int i = 0; i < 2; ++i) {
        low[i] = high[i] = finite(rows[i][0]);
        for (int64_t c = 1; c < n; ++c) {
          const float x = finite(rows[i][c]);
          low[i] = x < low[i] ? x : low[i];
          high[i] = x > high[i] ? x : high[i];
        }
        scale(steps, leasts, (t + i) * groups + g, low[i], high[i], high[i]);
      }
      for (int64_t c = 0; c < n; ++c) {
        codes[from + c] = static_cast<uint8_t>(code(finite(rows[0][c]), high[0], low[0]) |
                                               code(finite(rows[1][c]), high[1], low[1]) << 4);
      }
    }
  }
}

using Unpack = void (*)(const uint8_t*, int64_t, int64_t, float*, float*, float*);
using Pack = void (*)(const float*, const float*, int64_t, int64_t, uint8_t*, float*);
struct Kernels {
  Unpack unpack;
  Pack pack;
};

void unpack_portable(const uint8_t* page, int64_t d, int64_t dv, float* k, float* v,
                     float* scales) {
  unpack(page, d, dv, k, v, scales);
}

void pack_portable(const float* k, const float* v, int64_t d, int64_t dv, uint8_t* page,
                   float* scales) {
  pack(k, v, d, dv, page, scales);
}

#if defined(__x86_64__)
#define ESPNX_AVX2 __attribute__((target("avx2,fma")))
#define ESPNX_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")))

ESPNX_AVX2 void unpack_avx2(const uint8_t* page, int64_t d, int64_t dv, float* k, float* v,
                            float* scales) {
  unpack(page, d, dv, k, v, scales);
}

ESPNX_AVX2 void pack_avx2(const float* k, const float* v, int64_t d, int64_t dv, uint8_t* page,
                          float* scales) {
  pack(k, v, d, dv, page, scales);
}

ESPNX_AVX512 void unpack_avx512(const uint8_t* page, int64_t d, int64_t dv, float* k, float* v,
                                float* scales) {
  unpack(page, d, dv, k, v, scales);
}

ESPNX_AVX512 void pack_avx512(const float* k, const float* v, int64_t d, int64_t dv, uint8_t* page,
                              float* scales) {
  pack(k, v, d, dv, page, scales);
}
#endif

Kernels in_force() {
#if defined(__x86_64__)
  switch (cpu_level()) {
    case CpuLevel::kAmx:
    case CpuLevel::kVnni:
    case CpuLevel::kAvx512: return {unpack_avx512, pack_avx512};
    case CpuLevel::kAvx2: return {unpack_avx2, pack_avx2};
    case CpuLevel::kPortable: break;
  }
#endif
  return {unpack_portable, pack_portable};
}

// Memory of this thread.
float* scratch(int64_t n) {
  thread_local std::vector<float> scales;
  if (static_cast<int64_t>(scales.size()) < n) scales.resize(n);
  return scales.data();
}

}  // namespace

void unpack_page(const uint8_t* page, int64_t d, int64_t dv, float* k, float* v) {
  float* scales = scratch(2 * d + 2 * kPackedRows * packed_groups(dv));
  in_force().unpack(page, d, dv, k, v, scales);
}

void pack_page(const float* k, const float* v, int64_t d, int64_t dv, uint8_t* page) {
  in_force().pack(k, v, d, dv, page, scratch(2 * d));
}

}  // namespace espnx
