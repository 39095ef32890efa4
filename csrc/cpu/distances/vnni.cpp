// Distances of whole numbers with AVX-512 VNNI, which multiplies and adds to the sum in one
// instruction. Others have no such instruction: theirs are avx512.cpp's.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.hpp"

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own header leaves the merge operand of unmasked AVX-512 intrinsics undefined on purpose,
// and warns of it here.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define ESPNX_LEVEL __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx2")))
#define ESPNX_DOT(sum, a, b) _mm512_dpwssd_epi32(sum, a, b)

namespace espnx {
namespace {

#include "body.hpp"
#include "whole512.hpp"

}  // namespace

const DistanceTable kDistancesVnni = {{{kL2Of<Whole<false>>, kIpOf<Whole<false>>},
                                       {kL2Of<Whole<true>>, kIpOf<Whole<true>>},
                                       {},
                                       {},
                                       {}}};

}  // namespace espnx
#endif  // __x86_64__
