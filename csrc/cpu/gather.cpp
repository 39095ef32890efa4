#include "cpu/gather.hpp"

#include <algorithm>
#include <cstring>

#include "cpu/parallel.hpp"

namespace espnx {
namespace {

// What makes a thread of its own worth its start.
constexpr int64_t kPartBytes = 1 << 20;

}  // namespace

void gather(const uint8_t* data, const int64_t* offset, const int64_t* begin, int64_t n,
            int max_threads, uint8_t* out) {
  parallel_for(begin[n], kPartBytes, max_threads, [&](int, int64_t first, int64_t last) {
    // the last record that begins at `first` or before
    int64_t i = std::upper_bound(begin, begin + n + 1, first) - begin - 1;
    for (int64_t at = first; at < last; ++i) {
      const int64_t end = std::min(begin[i + 1], last);
      if (end == at) continue;
      std::memcpy(out + at, data + offset[i] + (at - begin[i]), static_cast<size_t>(end - at));
      at = end;
    }
  });
}

}  // namespace espnx
