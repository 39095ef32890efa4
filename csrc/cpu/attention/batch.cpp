// The batch driver of attention: one piece of work per sequence, KV head and, where threads would
// idle, part of the rows.
#include "batch.hpp"

#include <algorithm>
#include <atomic>
#include <limits>
#include <new>
#include <vector>

#include "cpu/parallel.hpp"

namespace espnx {
namespace {

// What pays for starting a thread (about 20 us): 0.2 ms of reading or of multiplying.
constexpr double kBytesPerThread = 2 << 20, kProductsPerThread = 8 << 20;
// A sequence is cut in pieces of at least so many rows where there are more threads than sequences
// and heads.
constexpr int64_t kMinPieceRows = 512;

int threads_worth(const AttentionBatch& batch, int max_threads) {
  double rows = 0;
  for (int64_t i = 0; i < batch.n; ++i) rows += static_cast<double>(batch.n_rows[i] * batch.n_kv);
  const double values = rows * static_cast<double>(batch.d + batch.dv);
  const double worth =
      std::max(values * static_cast<double>(row_item_bytes(batch.format)) / kBytesPerThread,
               values * static_cast<double>(batch.n_queries) / kProductsPerThread);
  return static_cast<int>(std::min<double>(std::max(max_threads, 1), 1 + worth));
}

// The batch as pieces of rows, and the states that they are folded into: the output itself, but for
// further pieces of one sequence.
class Pieces {
 public:
  Pieces(const AttentionBatch& batch, int n_threads, float* o, float* lse)
      : batch_(batch), o_(o), lse_(lse), n_heads_(batch.n * batch.n_kv) {
    int64_t rows_max = 0;
    for (int64_t i = 0; i < batch.n; ++i) rows_max = std::max(rows_max, batch.n_rows[i]);
    const int64_t wanted = n_heads_ >= n_threads ? 1 : (n_threads + n_heads_ - 1) / n_heads_;
    n_pieces_ = std::max<int64_t>(std::min(wanted, rows_max / kMinPieceRows), 1);
    const int64_t n_states = n_heads_ * n_pieces_;
    m_.assign(n_states * batch.n_queries, -std::numeric_limits<float>::infinity());
    l_.assign(n_states * batch.n_queries, 0.0f);
    further_o_.assign(n_heads_ * (n_pieces_ - 1) * batch.n_queries * batch.dv, 0.0f);
    std::fill_n(o, n_heads_ * batch.n_queries * batch.dv, 0.0f);
    // Query head by query head, the positions repeat.
    if (batch.last_position == nullptr) return;
    last_position_.resize(batch.n * batch.n_queries);
    for (int64_t i = 0; i < batch.n; ++i) {
      for (int64_t q = 0; q < batch.n_queries; ++q) {
        last_position_[i * batch.n_queries + q] =
            batch.last_position[i * batch.q_len + q % batch.q_len];
      }
    }
  }

  int64_t n_heads() const { return n_heads_; }
  int64_t count() const { return n_heads_ * n_pieces_; }

  void attend(int64_t index) const {
    const int64_t head = index / n_pieces_, piece = index % n_pieces_,
                  sequence = head / batch_.n_kv;
    const int64_t n_rows = batch_.n_rows[sequence],
                  blocks = (n_rows + batch_.block_rows - 1) / batch_.block_rows;
    const int64_t first_block = blocks * piece / n_pieces_,
                  end_block = blocks * (piece + 1) / n_pieces_;
    const int64_t begin = first_block * batch_.block_rows,
                  end = std::min(end_block * batch_.block_rows, n_rows);
    if (begin >= end) return;
    const bool is_int8 = batch_.format == RowFormat::int8;
    const int64_t floats = sizeof(float), k_begin = is_int8 ? floats * batch_.d : 0;
    const int64_t v_scales = k_begin + batch_.block_rows * batch_.d * row_item_bytes(batch_.format);
    const int64_t v_begin =
        batch_.is_x ? k_begin : v_scales + (is_int8 ? floats * batch_.block_rows : 0);
    const uint8_t* visible =
        batch_.visible ? batch_.visible + sequence * batch_.visible_stride + begin : nullptr;
    const AttentionRows rows{batch_.buffer + k_begin,
                             batch_.buffer + v_begin,
                             end - begin,
                             batch_.block_rows,
                             0,
                             batch_.format,
                             -k_begin,
                             v_scales - k_begin,
                             begin,
                             visible};
    const AttentionQueries queries{
        batch_.q + head * batch_.n_queries * batch_.d,
        batch_.n_queries,
        batch_.d,
        batch_.dv,
        last_position_.empty() ? nullptr : last_position_.data() + sequence * batch_.n_queries,
        nullptr};
    attend_scattered(queries, rows,
                     batch_.block_offset_bytes + head * batch_.n_blocks + first_block,
                     state(head, piece));
  }

  void finish(int64_t head) const {
    const AttentionState whole = state(head, 0);
    for (int64_t piece = 1; piece < n_pieces_; ++piece) {
      merge_attention(whole, state(head, piece), batch_.n_queries, batch_.dv);
    }
    finish_attention(whole, batch_.n_queries, batch_.dv, lse_ + head * batch_.n_queries);
  }

 private:
  AttentionState state(int64_t head, int64_t piece) const {
    const int64_t n = batch_.n_queries, at = (head * n_pieces_ + piece) * n;
    float* o = piece == 0
                   ? o_ + head * n * batch_.dv
                   : further_o_.data() + (head * (n_pieces_ - 1) + piece - 1) * n * batch_.dv;
    return {o, m_.data() + at, l_.data() + at};
  }

  const AttentionBatch& batch_;
  float* const o_;
  float* const lse_;
  const int64_t n_heads_;
  int64_t n_pieces_ = 1;
  // States are written by the one thread that has the piece.
  mutable std::vector<float> m_, l_, further_o_;
  std::vector<int64_t> last_position_;  // [n, n_queries]
};

}  // namespace

int64_t attention_block_bytes(const AttentionBatch& batch) {
  const int64_t scales = batch.format == RowFormat::int8
                             ? static_cast<int64_t>(sizeof(float)) * (batch.d + batch.block_rows)
                             : 0;
  return scales +
         batch.block_rows * (batch.d + (batch.is_x ? 0 : batch.dv)) * row_item_bytes(batch.format);
}

int64_t find_block_outside(const AttentionBatch& batch) {
  const int64_t bytes = attention_block_bytes(batch);
  for (int64_t head = 0; head < batch.n * batch.n_kv; ++head) {
    const int64_t blocks =
        (batch.n_rows[head / batch.n_kv] + batch.block_rows - 1) / batch.block_rows;
    for (int64_t b = head * batch.n_blocks; b < head * batch.n_blocks + blocks; ++b) {
      const int64_t offset = batch.block_offset_bytes[b];
      if (offset < 0 || offset > batch.buffer_bytes || bytes > batch.buffer_bytes - offset)
        return b;
    }
  }
  return -1;
}

void attend_batch(const AttentionBatch& batch, int max_threads, float* o, float* lse) {
  if (batch.n * batch.n_kv * batch.n_queries == 0) return;
  const int n_threads = threads_worth(batch, max_threads);
  const Pieces pieces(batch, n_threads, o, lse);
  std::atomic<bool> is_out_of_memory{false};
  parallel_for(pieces.count(), 1, n_threads, [&](int, int64_t begin, int64_t end) {
    try {
      for (int64_t i = begin; i < end; ++i) pieces.attend(i);
    } catch (const std::bad_alloc&) {  // of a thread's scratch
      is_out_of_memory = true;
    }
  });
  if (is_out_of_memory) throw std::bad_alloc();
  for (int64_t head = 0; head < pieces.n_heads(); ++head) pieces.finish(head);
}

}  // namespace espnx
