// The inner loops of attention, one table per instruction set. The driver (attention.cpp) is common
// to all.
//
// Rows are taken a tile of 128 at a time. Few queries (decode): scores are dot products along d,
// straight from the stored bytes, and lie [query][kTileRows]. Many queries (prefill, X rows):
// queries are packed in strips of `lanes` (strip[k][lane] = query[lane][k]), K is decoded to fp32
// once for all of them, and scores lie [row][lane], so that the softmax is vertical. V is summed
// the same way in both.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention.hpp"

namespace espnx {

constexpr int64_t kRowFormats = 5;    // RowFormat is an index; 0 is none
constexpr int64_t kTileRows = 128;    // rows folded in per rescaling of the softmax
constexpr int64_t kMaxFew = 4;        // queries that one call of score_rows or weigh takes, at most
constexpr int64_t kMaxStripPair = 2;  // strips that score_strips takes at once
constexpr int64_t kMaxLanes = 16;
constexpr int64_t kColumns =
    64;  // of V, decoded at a time for many queries: 32 KiB a tile, two thirds of an L1 cache

constexpr int64_t item_bytes(RowFormat format) {
  return format == RowFormat::fp32 ? 4 : format == RowFormat::int8 ? 1 : 2;
}

// Float number i at any address.
inline float float_at(const uint8_t* bytes, int64_t i) {
  float value;
  std::memcpy(&value, bytes + 4 * i, sizeof(value));
  return value;
}

// Rows of a tile that follow each other in memory.
struct RowSpan {
  const uint8_t* rows;
  const uint8_t*
      scales;  // int8 only, fp32: per channel where the rows are K, per row where they are V
  int64_t n;
  // What will be read next, as many rows: prefetched row by row on the way, since blocks of K and V
  // in turn defeat the prefetchers.
  const uint8_t* ahead;  // any address, or nullptr
  int64_t ahead_row_bytes;
};

struct DecodeTask {
  RowSpan span;
  int64_t row_bytes, column, n_columns;  // n_columns: a multiple of 8
  bool scales_are_of_rows;
  float* out;  // [span.n, out_stride]
  int64_t out_stride;
};

// out[i][c] = alpha[i] * o[i][c] + sum over the spans' rows t of p[i * p_query_stride + t *
// p_row_stride] * v[t][c], for columns [column, column + n_columns) of the rows and of nothing
// else: o and out point at the first of them.
struct WeighTask {
  const RowSpan* spans;
  int64_t n_spans, row_bytes, column, n_columns;
  const float* p;
  int64_t p_query_stride, p_row_stride;
  const float* alpha;
  const float* o;
  int64_t o_stride;
  float* out;
  int64_t out_stride;
  bool is_first;  // of the calls that read these rows: the one that prefetches
};

// scores[s][t][lane] is set to (or, with `add`, increased by) the products of strips and decoded
// rows over n_k values. Scores of strips are kTileRows * lanes apart. On the way, `ahead` (any
// address) is prefetched, evenly: prefetches in one burst would hold up the loads of the sums
// behind them.
struct StripTask {
  const float* strips;
  int64_t strip_stride;  // floats
  const float* rows;
  int64_t row_stride, n_rows, n_k;
  bool add;
  float* scores;
  const uint8_t* ahead;
  int64_t ahead_step_bytes;  // for each value of each row
};

struct AttentionKernels {
  int64_t lanes;      // of a strip
  int64_t n_queries;  // that one call of score_rows takes, at most
  bool is_fused;      // products are added without a rounding in between
  // scores[i * kTileRows + t] = <q[i], row t of the span> for n_q queries of stride d; scales are
  // not applied.
  void (*score_rows[kRowFormats])(const float* q, int64_t n_q, const RowSpan& span, int64_t d,
                                  float* scores);
  void (*weigh[kRowFormats])(const WeighTask& task,
                             int64_t n_q);  // n_q: up to kMaxFew; scales are not applied
  void (*decode[kRowFormats])(const DecodeTask& task);  // scales applied
  // The largest of n scores (NaNs aside); scores = exp(scores - m), returning their sum. n: a
  // multiple of 16.
  float (*row_max)(const float* scores, int64_t n);
  float (*row_exp)(float* scores, int64_t n, float m);
  // scores = cap * tanh(scores / cap), off by at most 4 units in the last place of cap. n: a
  // multiple of 16.
  void (*soft_cap)(float* scores, int64_t n, float cap);
  void (*score_strips)(const StripTask& task, int64_t n_strips);  // 1 or 2
  // Softmax of scores[n][lanes]: m and l are brought up to date, alpha is what older sums are to be
  // multiplied by, and the scores become probabilities, not normalised.
  void (*strip_softmax)(float* scores, int64_t n, float* m, float* l, float* alpha);
  // Of such probabilities p[n][lanes] the sum of each lane.
  void (*strip_sum)(const float* p, int64_t n, float* sums);
};

extern const AttentionKernels kAttentionPortable;
#if defined(__x86_64__)
extern const AttentionKernels kAttentionAvx2;
extern const AttentionKernels kAttentionAvx512;
#endif

}  // namespace espnx
