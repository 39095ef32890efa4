// What pages of rows weigh.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "fold.hpp"

namespace espnx {
namespace {

// Sums in eight turns: one after the other each would wait for the one before.
float sum_of(const float* p, int64_t n, int64_t stride) {
  float part[8] = {};
  int64_t t = 0;
  for (; t + 8 <= n; t += 8) {
    for (int64_t k = 0; k < 8; ++k) part[k] += p[(t + k) * stride];
  }
  for (; t < n; ++t) part[0] += p[t * stride];
  return ((part[0] + part[4]) + (part[1] + part[5])) + ((part[2] + part[6]) + (part[3] + part[7]));
}

}  // namespace

void add_to_pages(const AttentionTask& task, const AttentionTile& tile, int64_t query, int64_t i,
                  const float* p, int64_t stride, float base) {
  const int64_t page_rows = task.pages->page_rows,
                first_page = task.rows.first_position / page_rows;
  for (int64_t t = 0; t < tile.n;) {
    const int64_t page = (tile.first_position + t) / page_rows;
    const int64_t end = std::min(tile.n, (page + 1) * page_rows - tile.first_position);
    float sum = sum_of(p + t * stride, end - t, stride);
    for (int64_t row = t; sum == 0.0f && row < end; ++row) {
      if (tile.sees(i, row)) sum = FLT_MIN;  // less than an exponential can be
    }
    t = end;
    if (sum == 0.0f) continue;
    const int64_t at = (page - first_page) * task.queries.n + query;
    float &kept = task.pages->sum[at], &from = task.pages->base[at];
    kept = kept == 0.0f ? sum : kept * std::exp(from - base) + sum;
    from = base;
  }
}

}  // namespace espnx
