// The accelerator's inner loops, one table per instruction set. What they compute is the same to
// the bit: lanes are tokens (scores) or columns (values), whose sums do not meet.
#pragma once

#include <cstdint>

#include "accelerator.hpp"

namespace espnx::accelerator {

struct Kernels {
  // out[j * kBlock + t] = scale * <query j, row t>, summed dimension by dimension, for up to kGroup
  // queries (fp32) and kBlock rows (fp16, at any address). Up to kBlock scores of each query are
  // written, those beyond n_rows at random.
  void (*score)(const float* queries, int64_t n_queries, const uint8_t* const* rows, int64_t n_rows,
                float scale, float* out);
  // out[i] = exp(x[i] - m)
  void (*exponentials)(const float* x, float m, int64_t n, float* out);
  // o[j][c] += p[j * kBlock + t] * row t's value c, token by token, but where bit j of skipped[t]
  // is set.
  void (*add_values)(const float* p, int64_t n_queries, const uint8_t* const* rows, int64_t n_rows,
                     const uint8_t* skipped, float* o);
};

extern const Kernels kKernelsPortable;
#if defined(__x86_64__)
extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsAvx512;
#endif

}  // namespace espnx::accelerator
