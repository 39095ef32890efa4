// The driver of attention: walks the rows in tiles of 128 and folds each into the queries' states. What it holds beside
// the states is one tile's scores and decoded rows, whatever the sizes.
#include "attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "aligned.hpp"
#include "attention_kernels.hpp"
#include "cpu_level.hpp"

namespace espnx {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr const char* kNames[] = {"", "fp32", "fp16", "bf16", "int8"};
// Up to this many queries, dot products on the stored bytes beat strips that are half padding.
constexpr int64_t kFewQueries = 8;
// Values along d that are multiplied at a time for many queries: a pair of query strips that long takes 16 KiB of the
// L1 cache.
constexpr int64_t kDepth = 128;
// What is decoded of K at a time for many queries: at most 194 KiB, a tenth of an L2 cache.
constexpr int64_t kDecodedRows = 24, kDecodedColumns = 2048;
// Queries walked together: their q and o stay in half an L2 cache of 2 MiB.
constexpr int64_t kBlockValues = 1 << 18, kMinBlock = 32, kMaxBlock = 256;
constexpr int64_t kCarefulColumns = 128;

const AttentionKernels& kernels_in_force() {
#if defined(__x86_64__)
  switch (cpu_level()) {
    case CpuLevel::kAmx:
    case CpuLevel::kVnni:
    case CpuLevel::kAvx512: return kAttentionAvx512;
    case CpuLevel::kAvx2: return kAttentionAvx2;
    case CpuLevel::kPortable: break;
  }
#endif
  return kAttentionPortable;
}

// One array per thread, grown as needed, cut into pieces per call.
class Scratch {
 public:
  // Room for `n` floats from here on; what was taken before is void.
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

// Which rows of a tile each query sees: those from lo to hi that `visible` does not hide.
struct Sight {
  int64_t n;  // rows in the tile
  int64_t lo[kMaxBlock], hi[kMaxBlock];
  const uint8_t* visible;  // of the tile's rows, or nullptr where all are
  bool is_whole;           // every query sees every row

  bool sees(int64_t query, int64_t row) const {
    return row >= lo[query] && row < hi[query] && (visible == nullptr || visible[row] != 0);
  }
  bool sees_any(int64_t query) const { return lo[query] < hi[query]; }
};

class Attention {
 public:
  Attention(const AttentionQueries& queries, const AttentionRows& rows, const int64_t* block_offset_bytes,
            const AttentionState& state)
      : kernels_(kernels_in_force()),
        queries_(queries),
        rows_(rows),
        block_offset_bytes_(block_offset_bytes),
        state_(state),
        format_(static_cast<int>(rows.format)),
        k_row_bytes_(queries.d * item_bytes(rows.format)),
        v_row_bytes_(queries.dv * item_bytes(rows.format)) {}

  void fold_all() {
    if (queries_.n == 0 || rows_.n_rows == 0) return;
    const bool is_few = queries_.n <= kFewQueries;
    const int64_t block = is_few ? kFewQueries : block_queries();
    reserve(std::min(block, queries_.n), is_few);
    for (first_ = 0; first_ < queries_.n; first_ += block) {
      n_ = std::min(block, queries_.n - first_);
      if (is_few) {
        for_each_tile([this] { fold_few(); });
      } else {
        pack();
        for_each_tile([this] { fold_many(); });
        unpack();
      }
    }
  }

 private:
  int64_t block_queries() const {
    const int64_t fit = kBlockValues / (queries_.d + queries_.dv) / kMinBlock * kMinBlock;
    return std::min(std::max(fit, kMinBlock), kMaxBlock);
  }

  int64_t n_strips() const { return (n_ + kernels_.lanes - 1) / kernels_.lanes; }

  void reserve(int64_t n, bool is_few) {
    const int64_t lanes = kernels_.lanes, padded = (n + lanes - 1) / lanes * lanes;
    thread_local Scratch scratch;
    if (is_few) {
      const int64_t scaled = rows_.format == RowFormat::int8 ? n * queries_.d : 0;
      scratch.reserve(Scratch::rounded(n * kTileRows) + Scratch::rounded(n) + Scratch::rounded(scaled));
      scores_ = scratch.take(n * kTileRows);
      alpha_ = scratch.take(n);
      packed_ = scratch.take(scaled);
      return;
    }
    scratch.reserve(padded * (queries_.d + kTileRows) + 3 * Scratch::rounded(padded) + kDecodedRows * decoded_stride() +
                    kTileRows * kColumns + 64);
    packed_ = scratch.take(padded * queries_.d);
    scores_ = scratch.take(padded * kTileRows);
    alpha_ = scratch.take(padded);
    m_ = scratch.take(padded);
    l_ = scratch.take(padded);
    k_tile_ = scratch.take(kDecodedRows * decoded_stride());
    v_tile_ = scratch.take(kTileRows * kColumns);
  }

  // Calls fold() for every tile of which some query of the block sees something.
  template <typename Fold>
  void for_each_tile(const Fold& fold) {
    for (int64_t begin = 0; begin < rows_.n_rows; begin += kTileRows) {
      const int64_t n = std::min(kTileRows, rows_.n_rows - begin);
      if (!look(begin, n)) continue;
      cut(begin, n);
      fold();
    }
  }

  // Fills in what the block's queries see of a tile; false where that is nothing.
  bool look(int64_t begin, int64_t n) {
    const int64_t position = rows_.first_position + begin;
    sight_.n = n;
    sight_.visible = nullptr;
    if (rows_.visible != nullptr) {
      const uint8_t* visible = rows_.visible + begin;
      const int64_t hidden = std::count(visible, visible + n, uint8_t{0});
      if (hidden == n) return false;
      if (hidden > 0) sight_.visible = visible;
    }
    bool is_any = false;
    sight_.is_whole = sight_.visible == nullptr;
    for (int64_t i = 0; i < n_; ++i) {
      int64_t lo = 0, hi = n;
      if (queries_.last_position != nullptr) {
        hi = std::clamp(queries_.last_position[first_ + i], position - 1, position + n - 1) - position + 1;
      }
      if (queries_.first_visible != nullptr) {
        lo = std::clamp(queries_.first_visible[first_ + i], position, position + n) - position;
      }
      sight_.lo[i] = lo;
      sight_.hi[i] = hi;
      is_any |= lo < hi;
      sight_.is_whole &= lo == 0 && hi == n;
    }
    return is_any;
  }

  // The tile's rows as runs that lie in one block each.
  void cut(int64_t begin, int64_t n) {
    n_spans_ = 0;
    for (int64_t row = begin; row < begin + n;) {
      const int64_t block = row / rows_.block_rows, in_block = row % rows_.block_rows;
      const int64_t offset = block_offset_bytes_ ? block_offset_bytes_[block] : block * rows_.block_stride_bytes;
      const uint8_t* k = rows_.k + offset;
      const int64_t count = std::min(rows_.block_rows - in_block, begin + n - row);
      k_spans_[n_spans_] = {k + in_block * k_row_bytes_, nullptr, count};
      v_spans_[n_spans_] = {rows_.v + offset + in_block * v_row_bytes_, nullptr, count};
      if (rows_.format == RowFormat::int8) {
        k_spans_[n_spans_].scales = k + rows_.k_scale_offset_bytes;
        v_spans_[n_spans_].scales = k + rows_.v_scale_offset_bytes + in_block * static_cast<int64_t>(sizeof(float));
      }
      ++n_spans_;
      row += count;
    }
  }

  void fold_few() {
    const int64_t d = queries_.d;
    int64_t t = 0;
    for (int64_t s = 0; s < n_spans_; ++s) {
      const float* q = queries_.q + first_ * d;
      if (k_spans_[s].scales != nullptr) q = scaled_queries(q, k_spans_[s].scales);
      for (int64_t i = 0; i < n_; i += kernels_.n_queries) {
        const int64_t n_q = std::min(kernels_.n_queries, n_ - i);
        kernels_.score_rows[format_](q + i * d, n_q, k_spans_[s], d, scores_ + i * kTileRows + t);
      }
      t += k_spans_[s].n;
    }
    for (int64_t i = 0; i < n_; ++i) weights_of(i);
    WeighTask task{v_spans_, n_spans_, v_row_bytes_, 0,           queries_.dv, nullptr,    kTileRows,
                   1,        nullptr,  nullptr,      queries_.dv, nullptr,     queries_.dv};
    for (int64_t i = 0; i < n_; i += kMaxFew) {
      task.p = scores_ + i * kTileRows;
      task.alpha = alpha_ + i;
      task.out = state_.o + (first_ + i) * queries_.dv;
      task.o = task.out;
      weigh(rows_.format, task, i, std::min(kMaxFew, n_ - i));
    }
  }

  // int8: K's scales belong to channels, so they can be applied to the queries once a block.
  const float* scaled_queries(const float* q, const uint8_t* scales) {
    for (int64_t i = 0; i < n_; ++i) {
      for (int64_t k = 0; k < queries_.d; ++k)
        packed_[i * queries_.d + k] = q[i * queries_.d + k] * float_at(scales, k);
    }
    return packed_;
  }

  // Turns query i's scores into probabilities (not normalised), V's scales included, and brings m and l up to date.
  void weights_of(int64_t i) {
    float* scores = scores_ + i * kTileRows;
    const int64_t padded = (sight_.n + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
    std::fill(scores + sight_.n, scores + padded, kNothing);
    if (!sight_.is_whole) {
      for (int64_t t = 0; t < sight_.n; ++t) scores[t] = sight_.sees(i, t) ? scores[t] : kNothing;
    }
    float& m = state_.m[first_ + i];
    const float best = std::max(m, kernels_.row_max(scores, padded));
    // A query that has seen no row yet has no peak to subtract.
    const float peak = best == kNothing ? 0.0f : best;
    alpha_[i] = std::exp(m - peak);
    float& l = state_.l[first_ + i];
    l = l * alpha_[i] + kernels_.row_exp(scores, padded, peak);
    m = best;
    if (rows_.format != RowFormat::int8) return;
    int64_t t = 0;
    for (int64_t s = 0; s < n_spans_; ++s) {
      for (int64_t r = 0; r < v_spans_[s].n; ++r, ++t) {
        if (sight_.is_whole || sight_.sees(i, t)) scores[t] *= float_at(v_spans_[s].scales, r);
      }
    }
  }

  // Sums V for queries i.. of the block. Where some query does not see some row, that row's weight of 0 may have met an
  // infinity or a NaN; then the sum is made again from visible rows alone.
  void weigh(RowFormat format, WeighTask task, int64_t i, int64_t n_q) {
    const auto kernel = kernels_.weigh[static_cast<int>(format)];
    if (sight_.is_whole) return kernel(task, n_q);
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
        if (test != 0.0f) weigh_visible(format, task, i + q, q, sums);
        std::copy(sums, sums + task.n_columns, whole.out + c + q * whole.out_stride);
      }
    }
  }

  // Rounds as the kernels do, so that queries which do not see the row keep their bits.
  void weigh_visible(RowFormat format, const WeighTask& task, int64_t query, int64_t q, float* sums) const {
    for (int64_t k = 0; k < task.n_columns; ++k) sums[k] = task.alpha[q] * task.o[q * task.o_stride + k];
    int64_t t = 0;
    for (int64_t s = 0; s < task.n_spans; ++s) {
      const uint8_t* row = task.spans[s].rows;
      for (int64_t r = 0; r < task.spans[s].n; ++r, ++t, row += task.row_bytes) {
        if (!sight_.sees(query, t)) continue;
        const float p = task.p[q * task.p_query_stride + t * task.p_row_stride];
        for (int64_t k = 0; k < task.n_columns; ++k) {
          const float value = value_at(format, row, task.column + k);
          sums[k] = kernels_.is_fused ? std::fma(p, value, sums[k]) : p * value + sums[k];
        }
      }
    }
  }

  // The block's queries in strips, and their m and l, padded with lanes that nobody looks at.
  void pack() {
    const int64_t lanes = kernels_.lanes, d = queries_.d, padded = n_strips() * lanes;
    std::fill_n(packed_, padded * d, 0.0f);
    for (int64_t i = 0; i < n_; ++i) {
      const float* row = queries_.q + (first_ + i) * d;
      float* lane = packed_ + i / lanes * lanes * d + i % lanes;
      for (int64_t k = 0; k < d; ++k) lane[k * lanes] = row[k];
    }
    std::fill_n(m_, padded, kNothing);
    std::fill_n(l_, padded, 0.0f);
    std::copy_n(state_.m + first_, n_, m_);
    std::copy_n(state_.l + first_, n_, l_);
  }

  void unpack() const {
    std::copy_n(m_, n_, state_.m + first_);
    std::copy_n(l_, n_, state_.l + first_);
  }

  void fold_many() {
    const int64_t lanes = kernels_.lanes, strips = n_strips();
    for (int64_t s = 0; s < strips; ++s) {
      const int64_t end = std::min((s + 1) * lanes, n_);
      is_live_[s] = false;
      for (int64_t i = s * lanes; i < end; ++i) is_live_[s] |= sight_.sees_any(i);
    }
    score_many();
    for (int64_t s = 0; s < strips; ++s) {
      if (!is_live_[s]) continue;
      float* scores = scores_ + s * kTileRows * lanes;
      if (!sight_.is_whole) hide(scores, s * lanes, std::min(lanes, n_ - s * lanes));
      kernels_.strip_softmax(scores, sight_.n, m_ + s * lanes, l_ + s * lanes, alpha_ + s * lanes);
    }
    weigh_many();
  }

  // Rows are decoded whole, a few at a time: X rows are as long as a page, and reading them by columns would defeat the
  // prefetchers.
  void score_many() {
    const int64_t d = queries_.d, stride = decoded_stride(), item = item_bytes(rows_.format);
    for (int64_t column = 0; column < d; column += kDecodedColumns) {
      const int64_t n_columns = std::min(kDecodedColumns, d - column);
      for (int64_t t = 0; t < sight_.n; t += kDecodedRows) {
        const int64_t n = std::min(kDecodedRows, sight_.n - t);
        decode(k_spans_, t, n, {{}, k_row_bytes_, column, n_columns, false, k_tile_, stride});
        const uint8_t* next = row_behind(t + n - 1);
        for (int64_t k = 0; k < n_columns; k += kDepth) {
          StripTask task{};
          task.strip_stride = d * kernels_.lanes;
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

  // Where K's row behind row t of the tile lies if nothing comes between them; most often it does, and it is to be
  // prefetched.
  const uint8_t* row_behind(int64_t t) const {
    int64_t s = 0;
    while (t >= k_spans_[s].n) t -= k_spans_[s++].n;
    return s + 1 < n_spans_ && t + 1 == k_spans_[s].n ? k_spans_[s + 1].rows
                                                      : k_spans_[s].rows + (t + 1) * k_row_bytes_;
  }

  // Every strip against the task's rows, which are rows t.. of the tile, from value k on.
  void score_decoded(StripTask task, int64_t t, int64_t k) {
    const int64_t lanes = kernels_.lanes, strips = n_strips();
    for (int64_t s = 0; s < strips;) {
      if (!is_live_[s]) {
        ++s;
        continue;
      }
      const int64_t count = s + 1 < strips && is_live_[s + 1] ? 2 : 1;
      task.strips = packed_ + (s * queries_.d + k) * lanes;
      task.scores = scores_ + (s * kTileRows + t) * lanes;
      kernels_.score_strips(task, count);
      task.ahead_step_bytes = 0;  // once is enough
      s += count;
    }
  }

  // 16 floats more than a row has, so that rows do not all begin in the same set of the L1 cache.
  int64_t decoded_stride() const { return std::min(kDecodedColumns, queries_.d) + 16; }

  void hide(float* scores, int64_t first, int64_t n_lanes) const {
    const int64_t lanes = kernels_.lanes;
    for (int64_t lane = 0; lane < n_lanes; ++lane) {
      for (int64_t t = 0; t < sight_.lo[first + lane]; ++t) scores[t * lanes + lane] = kNothing;
      for (int64_t t = sight_.hi[first + lane]; t < sight_.n; ++t) scores[t * lanes + lane] = kNothing;
    }
    if (sight_.visible == nullptr) return;
    for (int64_t t = 0; t < sight_.n; ++t) {
      if (sight_.visible[t] == 0) std::fill_n(scores + t * lanes, lanes, kNothing);
    }
  }

  void weigh_many() {
    const int64_t lanes = kernels_.lanes, dv = queries_.dv;
    const RowSpan decoded{reinterpret_cast<const uint8_t*>(v_tile_), nullptr, sight_.n};
    for (int64_t c = 0; c < dv; c += kColumns) {
      const int64_t n_columns = std::min(kColumns, dv - c);
      decode(v_spans_, 0, sight_.n, {{}, v_row_bytes_, c, n_columns, true, v_tile_, kColumns});
      WeighTask task{&decoded, 1,         kColumns * static_cast<int64_t>(sizeof(float)),
                     0,        n_columns, nullptr,
                     1,        lanes,     nullptr,
                     nullptr,  dv,        nullptr,
                     dv};
      for (int64_t i = 0; i < n_; i += kMaxFew) {
        if (!is_live_[i / lanes]) continue;
        task.p = scores_ + i / lanes * lanes * kTileRows + i % lanes;
        task.alpha = alpha_ + i;
        task.out = state_.o + (first_ + i) * dv + c;
        task.o = task.out;
        weigh(RowFormat::fp32, task, i, std::min(kMaxFew, n_ - i));
      }
    }
  }

  // Decodes rows [first, first + n) of the tile; the task says everything but which rows.
  void decode(const RowSpan* spans, int64_t first, int64_t n, DecodeTask task) const {
    for (int64_t s = 0; n > 0; ++s) {
      if (first >= spans[s].n) {
        first -= spans[s].n;
        continue;
      }
      const int64_t count = std::min(n, spans[s].n - first);
      const int64_t scales_bytes = task.scales_are_of_rows ? first * static_cast<int64_t>(sizeof(float)) : 0;
      const uint8_t* scales = spans[s].scales ? spans[s].scales + scales_bytes : nullptr;
      task.span = {spans[s].rows + first * task.row_bytes, scales, count};
      kernels_.decode[format_](task);
      task.out += count * task.out_stride;
      n -= count;
      first = 0;
    }
  }

  const AttentionKernels& kernels_;
  const AttentionQueries& queries_;
  const AttentionRows& rows_;
  const int64_t* const block_offset_bytes_;
  const AttentionState& state_;
  const int format_;
  const int64_t k_row_bytes_, v_row_bytes_;
  int64_t first_ = 0, n_ = 0, n_spans_ = 0;  // the block of queries, and the tile's spans
  float *packed_ = nullptr, *scores_ = nullptr, *alpha_ = nullptr, *m_ = nullptr, *l_ = nullptr;
  float *k_tile_ = nullptr, *v_tile_ = nullptr;
  RowSpan k_spans_[kTileRows], v_spans_[kTileRows];
  Sight sight_;
  bool is_live_[kMaxBlock];  // per strip: some query of it sees something of the tile
};

}  // namespace

bool parse_row_format(const char* name, RowFormat* format) {
  for (int i = 1; i < kRowFormats; ++i) {
    if (std::strcmp(name, kNames[i]) == 0) return *format = static_cast<RowFormat>(i), true;
  }
  return false;
}

int64_t row_item_bytes(RowFormat format) { return item_bytes(format); }

void attend(const AttentionQueries& queries, const AttentionRows& rows, const AttentionState& state) {
  Attention(queries, rows, nullptr, state).fold_all();
}

void attend_scattered(const AttentionQueries& queries, const AttentionRows& rows, const int64_t* block_offset_bytes,
                      const AttentionState& state) {
  Attention(queries, rows, block_offset_bytes, state).fold_all();
}

void merge_attention(const AttentionState& into, const AttentionState& from, int64_t n, int64_t dv) {
  for (int64_t i = 0; i < n; ++i) {
    const float best = std::max(into.m[i], from.m[i]), peak = best == kNothing ? 0.0f : best;
    const float mine = std::exp(into.m[i] - peak), theirs = std::exp(from.m[i] - peak);
    into.l[i] = mine * into.l[i] + theirs * from.l[i];
    into.m[i] = best;
    float* o = into.o + i * dv;
    const float* other = from.o + i * dv;
    for (int64_t k = 0; k < dv; ++k) o[k] = mine * o[k] + theirs * other[k];
  }
}

void finish_attention(const AttentionState& state, int64_t n, int64_t dv, float* lse) {
  for (int64_t i = 0; i < n; ++i) {
    const float l = state.l[i];
    float* o = state.o + i * dv;
    if (l == 0.0f) {
      std::fill_n(o, dv, 0.0f);
    } else {
      for (int64_t k = 0; k < dv; ++k) o[k] /= l;
    }
    if (lse != nullptr) lse[i] = l == 0.0f ? kNothing : state.m[i] + std::log(l);
  }
}

}  // namespace espnx
