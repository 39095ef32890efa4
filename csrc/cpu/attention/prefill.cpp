// Attention of many queries (prefill, X rows): K and V are decoded to fp32 once for a block of
// them.
#include <algorithm>

#include "fold.hpp"

namespace espnx {
namespace {

// Values along d that are multiplied at a time: a pair of query strips that long takes 16 KiB of
// the L1 cache.
constexpr int64_t kDepth = 128;
// What is decoded of K at a time: at most 194 KiB, a tenth of an L2 cache.
constexpr int64_t kDecodedRows = 24, kDecodedColumns = 2048;
// Queries walked together: their q and o stay in half an L2 cache of 2 MiB.
constexpr int64_t kBlockValues = 1 << 18, kMinBlock = 32;

}  // namespace

// Decoded rows are 16 floats further apart than they are long, so that they do not all begin in the
// same set of the L1 cache.
ManyQueries::ManyQueries(const AttentionTask& task, Scratch& scratch)
    : task_(task),
      format_(static_cast<int>(task.rows.format)),
      lanes_(task.kernels.lanes),
      decoded_stride_(std::min(kDecodedColumns, task.queries.d) + 16) {
  const int64_t n = std::min(block_queries(task.queries), task.queries.n),
                padded = (n + lanes_ - 1) / lanes_ * lanes_;
  scratch.reserve(Scratch::rounded(padded * task.queries.d) + Scratch::rounded(padded * kTileRows) +
                  3 * Scratch::rounded(padded) + Scratch::rounded(kDecodedRows * decoded_stride_) +
                  kTileRows * kColumns);
  packed_ = scratch.take(padded * task.queries.d);
  scores_ = scratch.take(padded * kTileRows);
  alpha_ = scratch.take(padded);
  m_ = scratch.take(padded);
  l_ = scratch.take(padded);
  k_tile_ = scratch.take(kDecodedRows * decoded_stride_);
  v_tile_ = scratch.take(kTileRows * kColumns);
}

int64_t ManyQueries::block_queries(const AttentionQueries& queries) {
  const int64_t fit = kBlockValues / (queries.d + queries.dv) / kMinBlock * kMinBlock;
  return std::min(std::max(fit, kMinBlock), kMaxBlock);
}

// The block's queries in strips, and their m and l, padded with lanes that nobody looks at.
void ManyQueries::begin(int64_t first, int64_t n) {
  first_ = first, n_ = n;
  const int64_t lanes = lanes_, d = task_.queries.d, padded = n_strips() * lanes;
  std::fill_n(packed_, padded * d, 0.0f);
  for (int64_t i = 0; i < n_; ++i) {
    const float* row = task_.queries.q + (first_ + i) * d;
    float* lane = packed_ + i / lanes * lanes * d + i % lanes;
    for (int64_t k = 0; k < d; ++k) lane[k * lanes] = row[k];
  }
  std::fill_n(m_, padded, kNoScore);
  std::fill_n(l_, padded, 0.0f);
  std::copy_n(task_.state.m + first_, n_, m_);
  std::copy_n(task_.state.l + first_, n_, l_);
}

void ManyQueries::end() {
  std::copy_n(m_, n_, task_.state.m + first_);
  std::copy_n(l_, n_, task_.state.l + first_);
}

void ManyQueries::fold(const AttentionTile& tile) {
  const int64_t lanes = lanes_, strips = n_strips();
  for (int64_t s = 0; s < strips; ++s) {
    const int64_t end = std::min((s + 1) * lanes, n_);
    is_live_[s] = false;
    for (int64_t i = s * lanes; i < end; ++i) is_live_[s] |= tile.sees_any(i);
  }
  score(tile);
  for (int64_t s = 0; s < strips; ++s) {
    if (!is_live_[s]) continue;
    float* scores = scores_ + s * kTileRows * lanes;
    change_scores(tile, scores, s * lanes, std::min(lanes, n_ - s * lanes));
    if (!tile.is_whole) hide(tile, scores, s * lanes, std::min(lanes, n_ - s * lanes));
    task_.kernels.strip_softmax(scores, tile.n, m_ + s * lanes, l_ + s * lanes, alpha_ + s * lanes);
    if (task_.pages != nullptr)
      note_pages(tile, scores, s * lanes, std::min(lanes, n_ - s * lanes));
  }
  weigh(tile);
}

// What a strip's queries give to the pages.
void ManyQueries::note_pages(const AttentionTile& tile, const float* scores, int64_t first,
                             int64_t n_lanes) const {
  for (int64_t begin = 0; begin < tile.n;) {
    const PageRows page = page_rows_of(task_, tile, begin);
    float sums[kMaxLanes];
    task_.kernels.strip_sum(scores + begin * lanes_, page.end - begin, sums);
    for (int64_t lane = 0; lane < n_lanes; ++lane) {
      const int64_t i = first + lane;
      // A query that has seen no row yet has no peak.
      const float base = m_[i] == kNoScore ? 0.0f : m_[i];
      add_to_page(task_, tile, first_ + i, i, page, sums[lane], base);
    }
    begin = page.end;
  }
}

// Rows are decoded whole, a few at a time: X rows are as long as a page, and reading them by
// columns would defeat the prefetchers.
void ManyQueries::score(const AttentionTile& tile) {
  const int64_t d = task_.queries.d, stride = decoded_stride_, item = item_bytes(task_.rows.format);
  for (int64_t column = 0; column < d; column += kDecodedColumns) {
    const int64_t n_columns = std::min(kDecodedColumns, d - column);
    for (int64_t t = 0; t < tile.n; t += kDecodedRows) {
      const int64_t n = std::min(kDecodedRows, tile.n - t);
      decode(tile.k_spans, t, n, {{}, tile.k_row_bytes, column, n_columns, false, k_tile_, stride});
      const uint8_t* next = tile.k_behind(t + n - 1);
      for (int64_t k = 0; k < n_columns; k += kDepth) {
        StripTask task{};
        task.strip_stride = d * lanes_;
        task.rows = k_tile_ + k;
        task.row_stride = stride;
        task.n_rows = n;
        task.n_k = std::min(kDepth, n_columns - k);
        task.add = column + k > 0;
        task.ahead = next + k * n * item;
        task.ahead_step_bytes = item;
        score_decoded(task, t, column + k);
      }
    }
  }
}

// Every strip against the task's rows, which are rows t.. of the tile, from value k on.
void ManyQueries::score_decoded(StripTask task, int64_t t, int64_t k) {
  const int64_t lanes = lanes_, strips = n_strips();
  for (int64_t s = 0; s < strips;) {
    if (!is_live_[s]) {
      ++s;
      continue;
    }
    const int64_t count = s + 1 < strips && is_live_[s + 1] ? 2 : 1;
    task.strips = packed_ + (s * task_.queries.d + k) * lanes;
    task.scores = scores_ + (s * kTileRows + t) * lanes;
    task_.kernels.score_strips(task, count);
    task.ahead_step_bytes = 0;  // once is enough
    s += count;
  }
}

// Soft cap and slopes of a strip's queries.
void ManyQueries::change_scores(const AttentionTile& tile, float* scores, int64_t first,
                                int64_t n_lanes) const {
  const AttentionQueries& queries = task_.queries;
  if (queries.soft_cap > 0) {
    task_.kernels.soft_cap(scores, (tile.n * lanes_ + kMaxLanes - 1) / kMaxLanes * kMaxLanes,
                           queries.soft_cap);
  }
  if (queries.slopes == nullptr) return;
  for (int64_t lane = 0; lane < n_lanes; ++lane) {
    const float slope = queries.slopes[first_ + first + lane];
    const int64_t distance = tile.first_position - queries.position[first_ + first + lane];
    for (int64_t t = 0; t < tile.n; ++t)
      scores[t * lanes_ + lane] += slope * static_cast<float>(distance + t);
  }
}

void ManyQueries::hide(const AttentionTile& tile, float* scores, int64_t first,
                       int64_t n_lanes) const {
  const int64_t lanes = lanes_;
  for (int64_t lane = 0; lane < n_lanes; ++lane) {
    for (int64_t t = 0; t < tile.lo[first + lane]; ++t) scores[t * lanes + lane] = kNoScore;
    for (int64_t t = tile.hi[first + lane]; t < tile.n; ++t) scores[t * lanes + lane] = kNoScore;
  }
  if (tile.visible == nullptr) return;
  for (int64_t t = 0; t < tile.n; ++t) {
    if (tile.visible[t] == 0) std::fill_n(scores + t * lanes, lanes, kNoScore);
  }
}

void ManyQueries::weigh(const AttentionTile& tile) {
  const int64_t lanes = lanes_, dv = task_.queries.dv;
  const RowSpan decoded{reinterpret_cast<const uint8_t*>(v_tile_), nullptr, tile.n, nullptr, 0};
  for (int64_t c = 0; c < dv; c += kColumns) {
    const int64_t n_columns = std::min(kColumns, dv - c);
    decode(tile.v_spans, 0, tile.n, {{}, tile.v_row_bytes, c, n_columns, true, v_tile_, kColumns});
    WeighTask task{&decoded, 1,         kColumns * static_cast<int64_t>(sizeof(float)),
                   0,        n_columns, nullptr,
                   1,        lanes,     nullptr,
                   nullptr,  dv,        nullptr,
                   dv,       false};
    for (int64_t i = 0; i < n_; i += kMaxFew) {
      if (!is_live_[i / lanes]) continue;
      task.p = scores_ + i / lanes * lanes * kTileRows + i % lanes;
      task.alpha = alpha_ + i;
      task.out = task_.state.o + (first_ + i) * dv + c;
      task.o = task.out;
      weigh_seen(task_.kernels, tile, RowFormat::fp32, task, i, std::min(kMaxFew, n_ - i));
    }
  }
}

// Decodes rows [first, first + n) of the tile; the task says everything but which rows.
void ManyQueries::decode(const RowSpan* spans, int64_t first, int64_t n, DecodeTask task) const {
  for (int64_t s = 0; n > 0; ++s) {
    if (first >= spans[s].n) {
      first -= spans[s].n;
      continue;
    }
    const int64_t count = std::min(n, spans[s].n - first);
    const int64_t scales_bytes =
        task.scales_are_of_rows ? first * static_cast<int64_t>(sizeof(float)) : 0;
    const uint8_t* scales = spans[s].scales ? spans[s].scales + scales_bytes : nullptr;
    task.span = {spans[s].rows + first * task.row_bytes, scales, count, nullptr, 0};
    task_.kernels.decode[format_](task);
    task.out += count * task.out_stride;
    n -= count;
    first = 0;
  }
}

}  // namespace espnx
