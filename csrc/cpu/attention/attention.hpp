// Attention over stored K and V rows that lie in place, in blocks, in an I/O buffer: for each query
// row
//   o = sum over visible rows r of  softmax_r(<q, k_r>) v_r
// with every product, sum and exponential in fp32. Rows are folded in as they arrive (online
// softmax), in any order, and states of different rows can be merged; nothing of size queries x
// rows is ever stored.
#pragma once

#include <cstdint>

namespace espnx {

constexpr int64_t kMaxHeadDim = 16384;

enum class RowFormat : uint8_t { fp32 = 1, fp16 = 2, bf16 = 3, int8 = 4 };

bool parse_row_format(const char* name, RowFormat* format);
int64_t row_item_bytes(RowFormat format);  // 4, 2, 2, 1

// The K and V rows of consecutive tokens of one (sequence, KV head), in blocks of `block_rows`
// tokens: row r lies at k + (r / block_rows) * block_stride_bytes + (r % block_rows) * d * item
// bytes; V likewise with dv. The last block may be partly filled. X rows (the input of the
// projections, which stand for K and V at once): v == k, dv == d.
struct AttentionRows {
  const uint8_t* k;
  const uint8_t* v;
  int64_t n_rows, block_rows, block_stride_bytes;
  RowFormat format;
  // int8 only, relative to the block's k: an fp32 [d] scale per K channel of the block, an fp32
  // [block_rows] scale per V token.
  int64_t k_scale_offset_bytes, v_scale_offset_bytes;
  int64_t first_position;  // of row 0
  const uint8_t* visible;  // [n_rows], 0 hides the row from every query (padding), or nullptr
};

// All the query rows that look at one KV head: (q_len x group) rows.
struct AttentionQueries {
  const float* q;                // [n, d] contiguous, already multiplied by the softmax scale
  int64_t n, d, dv;              // d and dv: multiples of 8, 8..kMaxHeadDim
  const int64_t* last_position;  // [n] or nullptr: the row at position p is visible to query i iff
                                 // p <= last_position[i]
  const int64_t*
      first_visible;  // [n] or nullptr: and p >= first_visible[i] (left padding, sliding windows)
  // Scores are changed in this order. The row at position p adds slopes[i] * (p - position[i]) to
  // query i's score.
  float soft_cap = 0;             // a score s becomes soft_cap * tanh(s / soft_cap); 0: it stays
  const float* slopes = nullptr;  // [n] or nullptr (ALiBi)
  const int64_t* position = nullptr;  // [n], where there are slopes
};

// What the rows folded in so far amount to. A fresh state is o = 0, m = -inf, l = 0.
struct AttentionState {
  float* o;  // [n, dv], not normalised: the sum of exp(score - m) v
  float* m;  // [n], the largest score
  float* l;  // [n], the sum of exp(score - m)
};

// What each page of the rows of one call weighs for each query. A page holds the positions from one
// multiple of `page_rows` to the next; page 0 is that of the first row.
struct PageSums {
  int64_t page_rows;
  float* sum;   // [pages, n], the sum of exp(score - base) over what the query sees of the page; 0
                // before, and where it sees nothing; where it sees something, FLT_MIN or more
  float* base;  // [pages, n]
};

// How many pages the rows touch.
inline int64_t pages_touched(int64_t first_position, int64_t n_rows, int64_t page_rows) {
  return n_rows == 0 ? 0
                     : (first_position + n_rows - 1) / page_rows - first_position / page_rows + 1;
}

// Folds the rows in. One thread; allocates nothing but thread-local scratch.
// A NaN in K of a visible row makes that query's results NaN; whatever a hidden row holds has no
// effect.
// `pages`: what the pages weigh, or nullptr.
void attend(const AttentionQueries& queries, const AttentionRows& rows, const AttentionState& state,
            const PageSums* pages = nullptr);

// The part of all attention that falls on something, summed over queries: sum[i] * exp(base[i] -
// total[i]), `total` being the log-sum-exp of all scores of query i. `sum` nullptr: 1 for each.
// NaN where one of them is.
float attention_mass(const float* sum, const float* base, const float* total, int64_t n);

// The same where blocks are scattered: block b begins at k + block_offset_bytes[b] (and V, scales
// likewise), not at multiples of a stride. Better than a call per block, since the softmax is
// rescaled once per 128 rows.
void attend_scattered(const AttentionQueries& queries, const AttentionRows& rows,
                      const int64_t* block_offset_bytes, const AttentionState& state);

// Folds what another state of the same queries has seen into `into`.
void merge_attention(const AttentionState& into, const AttentionState& from, int64_t n, int64_t dv);

// o /= l; lse[i] = m + log l, unless lse is nullptr. A query with no visible row: o = 0, lse =
// -inf.
void finish_attention(const AttentionState& state, int64_t n, int64_t dv, float* lse);

}  // namespace espnx
