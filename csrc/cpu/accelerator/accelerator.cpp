// The accelerator's pass over one head: blocks of 128 tokens, the two passes of algorithm 1,
// threads over heads.
#include "accelerator.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/cpu_level.hpp"
#include "cpu/formats/half.hpp"
#include "cpu/parallel.hpp"
#include "exponential.hpp"
#include "kernels.hpp"

namespace espnx::accelerator {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

const Kernels& kernels() {
#if defined(__x86_64__)
  const CpuLevel level = cpu_level();
  if (level >= CpuLevel::kAvx512) return kKernelsAvx512;
  if (level >= CpuLevel::kAvx2) return kKernelsAvx2;
#endif
  return kKernelsPortable;
}

// fp32 to fp16, to the nearest, ties to even; beyond fp16's range infinity.
uint16_t to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return sign | 0x7E00;
  if (magnitude >= 0x477FF000) return sign | 0x7C00;  // from halfway between 65504 and 65536 on
  if (magnitude < 0x38800000) {                       // below 2^-14: the sum's last place is fp16's
    float value;
    std::memcpy(&value, &magnitude, sizeof(value));
    value += 0.5F;
    std::memcpy(&bits, &value, sizeof(bits));
    return static_cast<uint16_t>(sign | (bits - 0x3F000000));
  }
  const uint32_t rounded = magnitude + 0xFFF + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

float reduce_max(const float* x) {
  float level[kBlock];
  std::memcpy(level, x, sizeof(level));
  for (int64_t half = kBlock / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i)
      level[i] = level[i] > level[i + half] ? level[i] : level[i + half];
  }
  return level[0];
}

float reduce_sum(const float* x) {
  float level[kBlock];
  std::memcpy(level, x, sizeof(level));
  for (int64_t half = kBlock / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) level[i] = level[i] + level[i + half];
  }
  return level[0];
}

// Up to kGroup queries over the rows of one head.
class Head {
 public:
  Head(const Task& task, int64_t sequence, int64_t head, int64_t first_query)
      : task_(task),
        sequence_(sequence),
        head_(head),
        first_(first_query),
        n_(std::min(kGroup, task.n - first_query)) {
    queries_.resize(n_ * kDim);
    const uint16_t* q = task.query + at(first_query) * kDim;
    for (int64_t i = 0; i < n_ * kDim; ++i) queries_[i] = half_to_float(q[i]);
  }

  // Takes `pieces`, the head's own, in order.
  void gather(const std::vector<const Piece*>& pieces) {
    for (const Piece* piece : pieces) {
      for (int64_t row = 0; row < piece->n_rows; ++row) {
        const int64_t block = row / task_.block_rows, within = row % task_.block_rows;
        const uint8_t* begin =
            task_.buffer + piece->offset_bytes + block * 2 * task_.block_rows * kRowBytes;
        k_.push_back(begin + within * kRowBytes);
        v_.push_back(begin + (task_.block_rows + within) * kRowBytes);
        position_.push_back(piece->first_position + row);
      }
    }
    n_stored_ = static_cast<int64_t>(k_.size());
    const auto* values = reinterpret_cast<const uint8_t*>(task_.values);
    for (int64_t row = 0; row < task_.n_buffered; ++row) {
      v_.push_back(values +
                   ((sequence_ * task_.n_heads + head_) * task_.n_buffered + row) * kRowBytes);
      position_.push_back(task_.buffered_position + row);
    }
    n_rows_ = n_stored_ + task_.n_buffered;
    n_padded_ = (n_rows_ + kPadTo - 1) / kPadTo * kPadTo;
    x_.assign((n_padded_ + kBlock - 1) / kBlock * kBlock * n_, kMask);
    skipped_.assign(n_padded_, 0);
    for (int64_t t = 0; t < n_rows_; ++t) {
      for (int64_t j = 0; j < n_; ++j)
        skipped_[t] |= static_cast<uint8_t>(is_hidden(j, position_[t]) << j);
    }
  }

  void attend(const Kernels& with, uint16_t* o, float* lse) {
    for (int64_t begin = 0; begin < n_padded_; begin += kBlock) score_block(with, begin);
    float m[kGroup], z[kGroup];
    for (int64_t j = 0; j < n_; ++j) m[j] = kNone, z[j] = 0;
    for (int64_t begin = 0; begin < n_padded_; begin += kBlock) {
      for (int64_t j = 0; j < n_; ++j) add_statistics(with, begin, j, &m[j], &z[j]);
    }
    std::vector<float> sums(n_ * kDim, 0.0F);
    std::vector<uint8_t> hidden(skipped_);
    for (int64_t begin = 0; begin < n_rows_; begin += kBlock)
      weigh_block(with, begin, m, z, sums.data());
    for (int64_t j = 0; j < n_; ++j) {
      const auto sees = [j](uint8_t mask) { return (mask >> j & 1) == 0; };
      const bool sees_any = std::any_of(hidden.begin(), hidden.begin() + n_rows_, sees);
      const int64_t row = at(first_ + j);
      lse[row] = sees_any ? static_cast<float>(static_cast<double>(m[j]) + logarithm(z[j])) : kNone;
      for (int64_t c = 0; c < kDim; ++c)
        o[row * kDim + c] = sees_any ? to_half(sums[j * kDim + c]) : uint16_t{0};
    }
  }

 private:
  int64_t at(int64_t query) const { return (sequence_ * task_.n_heads + head_) * task_.n + query; }

  bool is_hidden(int64_t j, int64_t position) const {
    if (task_.first_visible != nullptr && position < task_.first_visible[sequence_]) return true;
    if (task_.visible != nullptr && task_.visible[sequence_ * task_.visible_stride + position] == 0)
      return true;
    return task_.last_position != nullptr && position > task_.last_position[first_ + j];
  }

  // Scores of a block lie [query][kBlock], block after block.
  float* scores(int64_t begin, int64_t j) { return x_.data() + begin * n_ + j * kBlock; }

  void score_block(const Kernels& with, int64_t begin) {
    const int64_t stored = std::clamp<int64_t>(n_stored_ - begin, 0, kBlock),
                  end = std::min(begin + kBlock, n_padded_);
    if (stored > 0)
      with.score(queries_.data(), n_, k_.data() + begin, stored, task_.scale, scores(begin, 0));
    for (int64_t j = 0; j < n_; ++j) {
      const float* handed =
          task_.n_buffered > 0 ? task_.scores + at(first_ + j) * task_.n_buffered : nullptr;
      float* x = scores(begin, j);
      for (int64_t t = begin + stored; t < end; ++t)
        x[t - begin] = t < n_rows_ ? handed[t - n_stored_] : kMask;
      for (int64_t t = begin; t < end; ++t) {
        if ((skipped_[t] >> j & 1) != 0) x[t - begin] = kMask;
      }
    }
  }

  void add_statistics(const Kernels& with, int64_t begin, int64_t j, float* m, float* z) {
    const int64_t n = std::min(kBlock, n_padded_ - begin);
    float lanes[kBlock];
    std::fill_n(std::copy_n(scores(begin, j), n, lanes), kBlock - n, kNone);
    const float m_block = reduce_max(lanes);
    with.exponentials(lanes, m_block, n, lanes);
    std::fill_n(lanes + n, kBlock - n, 0.0F);
    const float sum = reduce_sum(lanes);
    if (m_block > *m) {
      *z = *z * exponential(*m - m_block) + sum;
      *m = m_block;
    } else {
      *z = *z + sum * exponential(m_block - *m);
    }
  }

  void weigh_block(const Kernels& with, int64_t begin, const float* m, const float* z,
                   float* sums) {
    const int64_t n = std::min(kBlock, n_rows_ - begin);
    float p[kGroup * kBlock];
    for (int64_t j = 0; j < n_; ++j) {
      float* own = p + j * kBlock;
      with.exponentials(scores(begin, j), m[j], n, own);
      for (int64_t t = 0; t < n; ++t) own[t] = own[t] / z[j];
      // A hidden row counts by the weight that the mask leaves it. Where that is 0, what the row
      // holds has no effect, which 0 times an infinity would have.
      for (int64_t t = 0; t < n; ++t) {
        if (own[t] != 0) skipped_[begin + t] &= static_cast<uint8_t>(~(1U << j));
      }
    }
    with.add_values(p, n_, v_.data() + begin, n, skipped_.data() + begin, sums);
  }

  const Task& task_;
  int64_t sequence_, head_, first_, n_;
  int64_t n_stored_ = 0, n_rows_ = 0, n_padded_ = 0;
  std::vector<float> queries_, x_;
  std::vector<const uint8_t*> k_, v_;
  std::vector<int64_t> position_;
  std::vector<uint8_t> skipped_;  // bit j: query j does not see the token
};

}  // namespace

int64_t find_bad_piece(const Task& task) {
  for (int64_t i = 0; i < task.n_pieces; ++i) {
    const Piece& piece = task.pieces[i];
    const int64_t room = task.buffer_bytes / kRowBytes;  // no piece within the buffer has more rows
    if (piece.n_rows < 0 || piece.n_rows > room) return i;
    const int64_t blocks = (piece.n_rows + task.block_rows - 1) / task.block_rows;
    const int64_t size_bytes = blocks * 2 * task.block_rows * kRowBytes;
    const bool fits = piece.sequence >= 0 && piece.sequence < task.n_sequences && piece.head >= 0 &&
                      piece.head < task.n_heads && piece.first_position >= 0 &&
                      piece.offset_bytes >= 0 &&
                      piece.offset_bytes <= task.buffer_bytes - size_bytes;
    const bool is_masked =
        task.visible == nullptr || piece.first_position <= task.visible_stride - piece.n_rows;
    if (!fits || !is_masked) return i;
  }
  return -1;
}

void attend(const Task& task, int threads, uint16_t* o, float* lse) {
  const Kernels& with = kernels();
  std::vector<std::vector<const Piece*>> pieces(task.n_sequences * task.n_heads);
  for (int64_t i = 0; i < task.n_pieces; ++i) {
    pieces[task.pieces[i].sequence * task.n_heads + task.pieces[i].head].push_back(&task.pieces[i]);
  }
  const int64_t passes = (task.n + kGroup - 1) / kGroup;
  parallel_for(task.n_sequences * task.n_heads * passes, 1, threads,
               [&](int, int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t unit = i / passes;
                   Head head(task, unit / task.n_heads, unit % task.n_heads, i % passes * kGroup);
                   head.gather(pieces[unit]);
                   head.attend(with, o, lse);
                 }
               });
}

void score(const uint16_t* query, const uint16_t* rows, int64_t n_units, int64_t n, int64_t n_rows,
           float scale, int threads, float* scores) {
  const Kernels& with = kernels();
  parallel_for(n_units, 1, threads, [&](int, int64_t begin, int64_t end) {
    float queries[kGroup * kDim], block[kGroup * kBlock];
    const uint8_t* some[kBlock];
    for (int64_t unit = begin; unit < end; ++unit) {
      for (int64_t first = 0; first < n; first += kGroup) {
        const int64_t count = std::min(kGroup, n - first);
        for (int64_t i = 0; i < count * kDim; ++i)
          queries[i] = half_to_float(query[(unit * n + first) * kDim + i]);
        for (int64_t row = 0; row < n_rows; row += kBlock) {
          const int64_t here = std::min(kBlock, n_rows - row);
          for (int64_t t = 0; t < here; ++t) {
            some[t] = reinterpret_cast<const uint8_t*>(rows + (unit * n_rows + row + t) * kDim);
          }
          with.score(queries, count, some, here, scale, block);
          for (int64_t j = 0; j < count; ++j) {
            std::copy_n(block + j * kBlock, here, scores + (unit * n + first + j) * n_rows + row);
          }
        }
      }
    }
  });
}

}  // namespace espnx::accelerator
