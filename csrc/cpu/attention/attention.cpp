// The driver of attention: walks the rows in tiles of 128 and folds each into the queries' states.
// What is held beside the states is one tile's scores and decoded rows, whatever the sizes.
#include "attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/cpu_level.hpp"
#include "fold.hpp"

namespace espnx {
namespace {

constexpr const char* kNames[kRowFormats] = {"", "fp32", "fp16", "bf16", "int8"};

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

template <typename Fold>
void walk(const AttentionTask& task, const int64_t* block_offset_bytes, int64_t block, Fold fold) {
  AttentionTile tile(task.queries, task.rows, block_offset_bytes);
  for (int64_t first = 0; first < task.queries.n; first += block) {
    const int64_t n = std::min(block, task.queries.n - first);
    fold.begin(first, n);
    for (int64_t begin = 0; begin < task.rows.n_rows; begin += kTileRows) {
      if (tile.move(begin, first, n)) fold.fold(tile);
    }
    fold.end();
  }
}

void attend_blocks(const AttentionQueries& queries, const AttentionRows& rows,
                   const int64_t* block_offset_bytes, const AttentionState& state,
                   const PageSums* pages) {
  if (queries.n == 0 || rows.n_rows == 0) return;
  thread_local Scratch scratch;
  const AttentionTask task{kernels_in_force(), queries, rows, state, pages};
  if (queries.n <= FewQueries::kBlock) {
    walk(task, block_offset_bytes, FewQueries::kBlock, FewQueries(task, scratch));
  } else {
    walk(task, block_offset_bytes, ManyQueries::block_queries(queries), ManyQueries(task, scratch));
  }
}

}  // namespace

bool parse_row_format(const char* name, RowFormat* format) {
  for (int i = 1; i < kRowFormats; ++i) {
    if (std::strcmp(name, kNames[i]) == 0) return *format = static_cast<RowFormat>(i), true;
  }
  return false;
}

int64_t row_item_bytes(RowFormat format) { return item_bytes(format); }

void attend(const AttentionQueries& queries, const AttentionRows& rows, const AttentionState& state,
            const PageSums* pages) {
  attend_blocks(queries, rows, nullptr, state, pages);
}

void attend_scattered(const AttentionQueries& queries, const AttentionRows& rows,
                      const int64_t* block_offset_bytes, const AttentionState& state) {
  attend_blocks(queries, rows, block_offset_bytes, state, nullptr);
}

void merge_attention(const AttentionState& into, const AttentionState& from, int64_t n,
                     int64_t dv) {
  for (int64_t i = 0; i < n; ++i) {
    const float best = std::max(into.m[i], from.m[i]), peak = best == kNoScore ? 0.0f : best;
    const float mine = std::exp(into.m[i] - peak), theirs = std::exp(from.m[i] - peak);
    into.l[i] = mine * into.l[i] + theirs * from.l[i];
    into.m[i] = best;
    float* o = into.o + i * dv;
    const float* other = from.o + i * dv;
    for (int64_t k = 0; k < dv; ++k) o[k] = mine * o[k] + theirs * other[k];
  }
}

float attention_mass(const float* sum, const float* base, const float* total, int64_t n) {
  constexpr int64_t kSome = 64;
  const AttentionKernels& kernels = kernels_in_force();
  float mass = 0.0f;
  for (int64_t first = 0; first < n; first += kSome) {
    float part[kSome];
    const int64_t count = std::min(kSome, n - first),
                  padded = (count + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
    std::fill_n(part, padded, kNoScore);
    for (int64_t i = 0; i < count; ++i) {
      const bool is_any = base[first + i] != kNoScore && (sum == nullptr || sum[first + i] != 0.0f);
      if (is_any) part[i] = base[first + i] - total[first + i];
    }
    const float every = kernels.row_exp(part, padded, 0.0f);
    if (sum == nullptr) {
      mass += every;
      continue;
    }
    for (int64_t i = 0; i < count; ++i) {
      if (sum[first + i] != 0.0f) mass += sum[first + i] * part[i];
    }
  }
  return mass;
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
    if (lse != nullptr) lse[i] = l == 0.0f ? kNoScore : state.m[i] + std::log(l);
  }
}

}  // namespace espnx
