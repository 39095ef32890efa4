// Ragged records of a buffer as one compact run of bytes.
#pragma once

#include <cstdint>

namespace espnx {

// out[begin[i] .. begin[i + 1]) = the bytes from data[offset[i]] on, for each of n records. `begin`
// has n + 1 entries, from 0 on, none smaller than the one before; records may overlap in `data`,
// not with `out`. Shared out by bytes, not by records, between at most `max_threads` threads.
void gather(const uint8_t* data, const int64_t* offset, const int64_t* begin, int64_t n,
            int max_threads, uint8_t* out);

}  // namespace espnx
