// The two ways of folding a tile into the queries' states: for few queries, and for many.
#pragma once

#include <limits>
#include <memory>

#include "cpu/aligned.hpp"
#include "tile.hpp"

namespace espnx {

constexpr float kNoScore = -std::numeric_limits<float>::infinity();

// One array per thread, grown as needed, cut into pieces per call.
class Scratch {
 public:
  // Room for `n` floats from here on; what was taken before is invalid.
  void reserve(int64_t n) {
    if (n > size_) floats_ = std::make_unique<AlignedFloats>(static_cast<size_t>(n)), size_ = n;
    used_ = 0;
  }
  float* take(int64_t n) {
    float* piece = floats_->data() + used_;
    used_ += rounded(n);
    return piece;
  }
  static int64_t rounded(int64_t n) { return (n + 15) / 16 * 16; }

 private:
  std::unique_ptr<AlignedFloats> floats_;
  int64_t size_ = 0, used_ = 0;
};

struct AttentionTask {
  const AttentionKernels& kernels;
  const AttentionQueries& queries;
  const AttentionRows& rows;
  const AttentionState& state;
  const PageSums* pages;  // or nullptr
};

// Rows [begin, end) of a tile that lie in one page, by its number among those that the rows touch.
struct PageRows {
  int64_t begin, end, page;
};

// Those from row `begin` on.
PageRows page_rows_of(const AttentionTask& task, const AttentionTile& tile, int64_t begin);

// Adds what query `query` of the task and number `i` of the tile's gives to a page: the sum of the
// weights exp(score - base) of its rows, of those that it sees.
void add_to_page(const AttentionTask& task, const AttentionTile& tile, int64_t query, int64_t i,
                 const PageRows& page, float sum, float base);

// And to each page that the tile touches: weights p[t] = exp(score - base), 0 where it does not see
// row t.
void add_to_pages(const AttentionTask& task, const AttentionTile& tile, int64_t query, int64_t i,
                  const float* p, float base);

// Up to kFewQueries, where dot products on the stored bytes beat strips that are half padding.
class FewQueries {
 public:
  static constexpr int64_t kBlock = 8;
  FewQueries(const AttentionTask& task, Scratch& scratch);
  void begin(int64_t first, int64_t n) { first_ = first, n_ = n; }
  void fold(const AttentionTile& tile);
  void end() {}

 private:
  const float* scaled(const float* q, const uint8_t* scales);
  void change_scores(const AttentionTile& tile, int64_t i);
  void weights_of(const AttentionTile& tile, int64_t i);

  const AttentionTask& task_;
  const int format_;
  int64_t first_ = 0, n_ = 0;
  float *scores_, *alpha_, *scaled_;
};

class ManyQueries {
 public:
  ManyQueries(const AttentionTask& task, Scratch& scratch);
  static int64_t block_queries(const AttentionQueries& queries);
  void begin(int64_t first, int64_t n);  // packs them
  void fold(const AttentionTile& tile);
  void end();  // hands m and l back

 private:
  int64_t n_strips() const { return (n_ + lanes_ - 1) / lanes_; }
  void score(const AttentionTile& tile);
  void score_decoded(StripTask task, int64_t t, int64_t k);
  void note_pages(const AttentionTile& tile, const float* scores, int64_t first,
                  int64_t n_lanes) const;
  void change_scores(const AttentionTile& tile, float* scores, int64_t first,
                     int64_t n_lanes) const;
  void hide(const AttentionTile& tile, float* scores, int64_t first, int64_t n_lanes) const;
  void weigh(const AttentionTile& tile);
  void decode(const RowSpan* spans, int64_t first, int64_t n, DecodeTask task) const;

  const AttentionTask& task_;
  const int format_;
  const int64_t lanes_, decoded_stride_;
  int64_t first_ = 0, n_ = 0;
  float *packed_, *scores_, *alpha_, *m_, *l_, *k_tile_, *v_tile_;
  bool is_live_[kMaxBlock];  // per strip: some query of it sees something of the tile
};

// Sums V for n_q queries, the i-th of the block first. Where some query does not see some row, that
// row's weight of 0 may meet an infinity or a NaN; then the sum is made again from visible rows
// alone.
void weigh_seen(const AttentionKernels& kernels, const AttentionTile& tile, RowFormat format,
                WeighTask task, int64_t i, int64_t n_q);

}  // namespace espnx
