#include "bf16.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/cpu_level.hpp"
#include "ordinary.hpp"

namespace espnx {
namespace {

const PartKernels* part_kernels_in_force() {
#if defined(__x86_64__)
  if (cpu_level() == CpuLevel::kAmx) return &kPartsAmx;
#endif
  return nullptr;
}

// To the nearest bf16, ties to even; `value` is finite and far from overflow.
uint16_t nearest_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

float from_bf16(uint16_t high) {
  const uint32_t bits = static_cast<uint32_t>(high) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

size_t floats_for(int64_t halves) { return static_cast<size_t>((halves + 1) / 2); }

uint16_t* halves_of(AlignedFloats& memory) { return reinterpret_cast<uint16_t*>(memory.data()); }

}  // namespace

PartQueries::PartQueries(const MaxsimQueries& queries, TokenFormat format)
    : source(queries),
      format(format),
      strips((queries.n_tokens + kLanes - 1) / kLanes),
      document_parts(format == TokenFormat::kFp16 ? 2 : 1),
      kernels(part_kernels_in_force()),
      packed_(0) {
  if (format != TokenFormat::kFp16 && format != TokenFormat::kBf16) return;
  if (kernels == nullptr || source.d > kPartDimMax || source.n_tokens < kMinStripTokens) return;
  const int64_t d = source.d, n_rows = source.n_queries * source.n_tokens;
  for (int64_t row = 0; row < n_rows; ++row) {
    if (!is_ordinary(source.values + row * d, d)) return;
  }
  packed_ = AlignedFloats(floats_for(source.n_queries * strips * part_strip_values(d)));
  packed_.fill(0.0f);
  std::vector<float> rest(static_cast<size_t>(kLanes * d));
  std::vector<uint16_t> part(rest.size());
  for (int64_t q = 0; q < source.n_queries; ++q) {
    for (int64_t s = 0; s < strips; ++s) {
      const int64_t n = std::min(kLanes, source.n_tokens - s * kLanes);
      std::fill(rest.begin(), rest.end(), 0.0f);
      std::copy_n(source.values + (q * source.n_tokens + s * kLanes) * d, n * d, rest.begin());
      uint16_t* strip = halves_of(packed_) + (q * strips + s) * part_strip_values(d);
      for (int64_t p = 0; p < kQueryParts; ++p) {
        for (size_t i = 0; i < rest.size(); ++i) {
          part[i] = nearest_bf16(rest[i]);
          rest[i] -= from_bf16(part[i]);
        }
        kernels->pack_part(part.data(), d, p, strip);
      }
    }
  }
  usable = true;
}

PartScorer::PartScorer(const PartQueries& queries)
    : queries_(queries),
      row_bytes_(token_row_bytes(queries.format, queries.source.d)),
      parts_(queries.usable ? floats_for(kPartChunk * queries.document_parts *
                                         part_row_values(queries.source.d))
                            : 0) {
  parts_.fill(0.0f);
}

bool PartScorer::split(const uint8_t* rows, int64_t n_tokens) {
  const PartKernels& kernels = *queries_.kernels;
  const int64_t d = queries_.source.d;
  uint16_t* parts = halves_of(parts_);
  const auto split_rows =
      queries_.format == TokenFormat::kFp16 ? kernels.split_fp16 : kernels.split_bf16;
  return split_rows(rows, n_tokens, d, parts);
}

bool PartScorer::fold(const uint8_t* rows, int64_t n_tokens, const uint8_t* ahead, float* running) {
  if (!split(rows, n_tokens)) return false;
  const uint16_t* parts = halves_of(parts_);
  for (int64_t q = 0; q < queries_.source.n_queries; ++q) {
    for (int64_t s = 0; s < queries_.strips; s += kMaxStrips) {
      const int64_t n_strips = std::min(kMaxStrips, queries_.strips - s);
      const int64_t ahead_bytes = q == 0 && s == 0 ? kPartChunk * row_bytes_ : 0;
      queries_.kernels->block_max(queries_.strip(q, s), n_strips, parts, queries_.document_parts,
                                  n_tokens, queries_.source.d,
                                  running + (q * queries_.strips + s) * kLanes, ahead, ahead_bytes);
    }
  }
  return true;
}

}  // namespace espnx
