// The inner loops of distances, one table per instruction set. The driver (distances.cpp) is common
// to all.
#pragma once

#include <cstdint>

#include "distances.hpp"

namespace espnx {

// Queries are padded with zeros to a multiple of this many values.
constexpr int64_t kQueryPad = 32;

// out[i] = distance of `query` (int16 for whole numbers, else fp32; padded) to the vector of d
// values at rows[i].
using DistanceKernel = void (*)(const void* query, const uint8_t* const* rows, int64_t n, int64_t d,
                                float* out);

struct DistanceTable {
  DistanceKernel of[kVectorFormats][kMetrics];
};

extern const DistanceTable kDistancesPortable;
#if defined(__x86_64__)
extern const DistanceTable kDistancesAvx2;
extern const DistanceTable kDistancesAvx512;
extern const DistanceTable kDistancesVnni;
#endif

}  // namespace espnx
