// The weighted sum of V rows, with care for those that are hidden; and the sums of weights by page.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "cpu/formats/half.hpp"
#include "fold.hpp"

namespace espnx {
namespace {

constexpr int64_t kCarefulColumns = 128;

float value_at(RowFormat format, const uint8_t* row, int64_t k) {
  if (format == RowFormat::fp32) return float_at(row, k);
  if (format == RowFormat::int8) return static_cast<float>(static_cast<int8_t>(row[k]));
  uint16_t half;
  std::memcpy(&half, row + 2 * k, sizeof(half));
  if (format == RowFormat::fp16) return half_to_float(half);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Rounds as the kernels do, so that queries which do not see a row keep their bits whatever it
// holds.
void weigh_visible(const AttentionKernels& kernels, const AttentionTile& tile, RowFormat format,
                   const WeighTask& task, int64_t query, int64_t q, float* sums) {
  for (int64_t k = 0; k < task.n_columns; ++k)
    sums[k] = task.alpha[q] * task.o[q * task.o_stride + k];
  int64_t t = 0;
  for (int64_t s = 0; s < task.n_spans; ++s) {
    const uint8_t* row = task.spans[s].rows;
    for (int64_t r = 0; r < task.spans[s].n; ++r, ++t, row += task.row_bytes) {
      if (!tile.sees(query, t)) continue;
      const float p = task.p[q * task.p_query_stride + t * task.p_row_stride];
      for (int64_t k = 0; k < task.n_columns; ++k) {
        const float value = value_at(format, row, task.column + k);
        sums[k] = kernels.is_fused ? std::fma(p, value, sums[k]) : p * value + sums[k];
      }
    }
  }
}

// Sums in eight turns: one after the other each would wait for the one before.
float sum_of(const float* p, int64_t n) {
  float part[8] = {};
  int64_t t = 0;
  for (; t + 8 <= n; t += 8) {
    for (int64_t k = 0; k < 8; ++k) part[k] += p[t + k];
  }
  for (; t < n; ++t) part[0] += p[t];
  return ((part[0] + part[4]) + (part[1] + part[5])) + ((part[2] + part[6]) + (part[3] + part[7]));
}

}  // namespace

void weigh_seen(const AttentionKernels& kernels, const AttentionTile& tile, RowFormat format,
                WeighTask task, int64_t i, int64_t n_q) {
  const auto kernel = kernels.weigh[static_cast<int>(format)];
  if (tile.is_whole) return kernel(task, n_q);
  float careful[kMaxFew * kCarefulColumns];
  const WeighTask whole = task;
  for (int64_t c = 0; c < whole.n_columns; c += kCarefulColumns) {
    task.column = whole.column + c;
    task.n_columns = std::min(kCarefulColumns, whole.n_columns - c);
    task.o = whole.o + c;
    task.out = careful;
    task.out_stride = kCarefulColumns;
    kernel(task, n_q);
    for (int64_t q = 0; q < n_q; ++q) {
      float* sums = careful + q * kCarefulColumns;
      float test = 0.0f;
      for (int64_t k = 0; k < task.n_columns; ++k) test += sums[k] * 0.0f;
      if (test != 0.0f) weigh_visible(kernels, tile, format, task, i + q, q, sums);
      std::copy(sums, sums + task.n_columns, whole.out + c + q * whole.out_stride);
    }
  }
}

PageRows page_rows_of(const AttentionTask& task, const AttentionTile& tile, int64_t begin) {
  const int64_t rows = task.pages->page_rows, page = (tile.first_position + begin) / rows;
  return {begin, std::min(tile.n, (page + 1) * rows - tile.first_position),
          page - task.rows.first_position / rows};
}

void add_to_page(const AttentionTask& task, const AttentionTile& tile, int64_t query, int64_t i,
                 const PageRows& page, float sum, float base) {
  for (int64_t row = page.begin; sum == 0.0f && row < page.end; ++row) {
    if (tile.sees(i, row)) sum = FLT_MIN;  // less than an exponential can be
  }
  if (sum == 0.0f) return;
  const int64_t at = page.page * task.queries.n + query;
  float &kept = task.pages->sum[at], &from = task.pages->base[at];
  kept = kept == 0.0f ? sum : kept * std::exp(from - base) + sum;
  from = base;
}

void add_to_pages(const AttentionTask& task, const AttentionTile& tile, int64_t query, int64_t i,
                  const float* p, float base) {
  for (int64_t begin = 0; begin < tile.n;) {
    const PageRows page = page_rows_of(task, tile, begin);
    add_to_page(task, tile, query, i, page, sum_of(p + begin, page.end - begin), base);
    begin = page.end;
  }
}

}  // namespace espnx
