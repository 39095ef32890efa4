// The accelerator in the compiler's baseline.
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <cstring>

#include "cpu/formats/half.hpp"
#include "exponential.hpp"
#include "kernels.hpp"

#define ESPNX_LEVEL

namespace espnx::accelerator {
namespace {

constexpr int kWidth = 4;
using Vec = float __attribute__((vector_size(4 * kWidth)));

inline Vec load_halves(const uint16_t* p) {
  Vec out;
  for (int i = 0; i < kWidth; ++i) out[i] = half_to_float(p[i]);
  return out;
}

#include "body.hpp"

}  // namespace

const Kernels kKernelsPortable = kTable;

}  // namespace espnx::accelerator
