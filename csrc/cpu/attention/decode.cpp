// Attention of a few queries (decode): scores straight from the stored bytes.
#include <algorithm>
#include <cmath>

#include "cpu/formats/scale.hpp"
#include "fold.hpp"

namespace espnx {

FewQueries::FewQueries(const AttentionTask& task, Scratch& scratch)
    : task_(task), format_(static_cast<int>(task.rows.format)) {
  const int64_t n = std::min(kBlock, task.queries.n),
                n_scaled = task.rows.format == RowFormat::int8 ? n * task.queries.d : 0;
  scratch.reserve(Scratch::rounded(n * kTileRows) + Scratch::rounded(n) +
                  Scratch::rounded(n_scaled));
  scores_ = scratch.take(n * kTileRows);
  alpha_ = scratch.take(n);
  scaled_ = scratch.take(n_scaled);
}

void FewQueries::fold(const AttentionTile& tile) {
  const int64_t d = task_.queries.d;
  int64_t t = 0;
  for (int64_t s = 0; s < tile.n_spans; ++s) {
    const float* q = task_.queries.q + first_ * d;
    if (tile.k_spans[s].scales != nullptr) q = scaled(q, tile.k_spans[s].scales);
    for (int64_t i = 0; i < n_; i += task_.kernels.n_queries) {
      const int64_t n_q = std::min(task_.kernels.n_queries, n_ - i);
      RowSpan span = tile.k_spans[s];
      if (i > 0) span.ahead = nullptr;
      task_.kernels.score_rows[format_](q + i * d, n_q, span, d, scores_ + i * kTileRows + t);
    }
    t += tile.k_spans[s].n;
  }
  for (int64_t i = 0; i < n_; ++i) change_scores(tile, i);
  for (int64_t i = 0; i < n_; ++i) weights_of(tile, i);
  WeighTask task{tile.v_spans,     tile.n_spans, tile.v_row_bytes, 0,
                 task_.queries.dv, nullptr,      kTileRows,        1,
                 nullptr,          nullptr,      task_.queries.dv, nullptr,
                 task_.queries.dv, true};
  for (int64_t i = 0; i < n_; i += kMaxFew) {
    task.p = scores_ + i * kTileRows;
    task.alpha = alpha_ + i;
    task.out = task_.state.o + (first_ + i) * task_.queries.dv;
    task.o = task.out;
    task.is_first = i == 0;
    weigh_seen(task_.kernels, tile, task_.rows.format, task, i, std::min(kMaxFew, n_ - i));
  }
}

// int8: K's scales belong to channels, so they can be applied to the queries once a block.
const float* FewQueries::scaled(const float* q, const uint8_t* scales) {
  for (int64_t i = 0; i < n_; ++i) {
    for (int64_t k = 0; k < task_.queries.d; ++k)
      scaled_[i * task_.queries.d + k] = q[i * task_.queries.d + k] * scale_at(scales, k);
  }
  return scaled_;
}

// Soft cap and slope of query i. What stands behind the tile's last row is overwritten later.
void FewQueries::change_scores(const AttentionTile& tile, int64_t i) {
  float* scores = scores_ + i * kTileRows;
  const AttentionQueries& queries = task_.queries;
  if (queries.soft_cap > 0) {
    task_.kernels.soft_cap(scores, (tile.n + kMaxLanes - 1) / kMaxLanes * kMaxLanes,
                           queries.soft_cap);
  }
  if (queries.slopes == nullptr) return;
  const float slope = queries.slopes[first_ + i];
  const int64_t distance = tile.first_position - queries.position[first_ + i];
  for (int64_t t = 0; t < tile.n; ++t) scores[t] += slope * static_cast<float>(distance + t);
}

// Turns query i's scores into probabilities (not normalised), V's scales included, and brings m and
// l up to date.
void FewQueries::weights_of(const AttentionTile& tile, int64_t i) {
  float* scores = scores_ + i * kTileRows;
  const int64_t padded = (tile.n + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
  std::fill(scores + tile.n, scores + padded, kNoScore);
  if (!tile.is_whole) {
    for (int64_t t = 0; t < tile.n; ++t) scores[t] = tile.sees(i, t) ? scores[t] : kNoScore;
  }
  float& m = task_.state.m[first_ + i];
  const float best = std::max(m, task_.kernels.row_max(scores, padded));
  // A query that has seen no row yet has no peak to subtract.
  const float peak = best == kNoScore ? 0.0f : best;
  alpha_[i] = std::exp(m - peak);
  float& l = task_.state.l[first_ + i];
  l = l * alpha_[i] + task_.kernels.row_exp(scores, padded, peak);
  m = best;
  if (task_.pages != nullptr) add_to_pages(task_, tile, first_ + i, i, scores, peak);
  if (task_.rows.format != RowFormat::int8) return;
  int64_t t = 0;
  for (int64_t s = 0; s < tile.n_spans; ++s) {
    for (int64_t r = 0; r < tile.v_spans[s].n; ++r, ++t) {
      if (tile.is_whole || tile.sees(i, t)) scores[t] *= scale_at(tile.v_spans[s].scales, r);
    }
  }
}

}  // namespace espnx
