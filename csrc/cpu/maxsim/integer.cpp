#include "integer.hpp"

#include <algorithm>
#include <cmath>

#include "cpu/cpu_level.hpp"
#include "ordinary.hpp"

namespace espnx {
namespace {

const CodeKernels* code_kernels_in_force() {
#if defined(__x86_64__)
  switch (cpu_level()) {
    case CpuLevel::kAmx: return &kCodesAmx;
    case CpuLevel::kVnni: return &kCodesVnni;
    default: return nullptr;
  }
#endif
  return nullptr;
}

size_t floats_for(int64_t bytes) { return static_cast<size_t>((bytes + 3) / 4); }

uint8_t* bytes_of(AlignedFloats& memory) { return reinterpret_cast<uint8_t*>(memory.data()); }

}  // namespace

CodeQueries::CodeQueries(const MaxsimQueries& queries, TokenFormat format)
    : source(queries),
      format(format),
      strips((queries.n_tokens + kLanes - 1) / kLanes),
      kernels(code_kernels_in_force()),
      packed_(0) {
  if (format != TokenFormat::kInt8 && format != TokenFormat::kBit1) return;
  if (kernels == nullptr || source.d > kCodeDimMax || source.n_tokens < kMinStripTokens) return;
  packed_ = AlignedFloats(floats_for(source.n_queries * strips * kernels->strip_bytes(source.d)));
  packed_.fill(0.0f);
  steps_.resize(static_cast<size_t>(source.n_queries * source.n_tokens));
  std::vector<int16_t> rows(static_cast<size_t>(kLanes * source.d));
  for (int64_t q = 0; q < source.n_queries; ++q) {
    for (int64_t s = 0; s < strips; ++s) {
      if (!round_strip(q, s, rows.data())) return;
      kernels->pack_strip(rows.data(), source.d,
                          bytes_of(packed_) + (q * strips + s) * kernels->strip_bytes(source.d));
    }
  }
  usable = true;
}

// False where a token's largest value is no ordinary number.
bool CodeQueries::round_strip(int64_t query, int64_t s, int16_t* rows) {
  std::fill_n(rows, kLanes * source.d, int16_t{0});
  const int64_t end = std::min(source.n_tokens, (s + 1) * kLanes);
  for (int64_t t = s * kLanes; t < end; ++t, rows += source.d) {
    const float* values = source.values + (query * source.n_tokens + t) * source.d;
    if (!is_ordinary(values, source.d)) return false;
    float peak = 0.0f;
    for (int64_t k = 0; k < source.d; ++k) peak = std::max(peak, std::fabs(values[k]));
    const float step = peak / kQuerySteps, inverse = peak == 0.0f ? 0.0f : kQuerySteps / peak;
    steps_[static_cast<size_t>(query * source.n_tokens + t)] = step;
    for (int64_t k = 0; k < source.d; ++k) {
      const long rounded = std::lrint(values[k] * inverse);
      rows[k] = static_cast<int16_t>(std::clamp<long>(rounded, -kQuerySteps, kQuerySteps));
    }
  }
  return true;
}

CodeScorer::CodeScorer(const CodeQueries& queries)
    : queries_(queries),
      row_bytes_(token_row_bytes(queries.format, queries.source.d)),
      sign_value_(static_cast<float>(1.0 / std::sqrt(static_cast<double>(queries.source.d)))),
      codes_(queries.usable
                 ? floats_for(kCodeChunk * queries.kernels->code_row_bytes(queries.source.d))
                 : 0),
      scales_(queries.usable ? kCodeChunk : 0) {
  codes_.fill(0.0f);
}

bool CodeScorer::fold(const uint8_t* rows, int64_t n_tokens, const uint8_t* ahead, float* running) {
  const CodeKernels& kernels = *queries_.kernels;
  const int64_t d = queries_.source.d;
  float* scales = scales_.data();
  if (queries_.format == TokenFormat::kBit1) {
    std::fill_n(scales, n_tokens, sign_value_);
    kernels.unpack_bit1(rows, n_tokens, d, bytes_of(codes_), ahead);
  } else {
    bool all_ordinary = true;
    for (int64_t t = 0; t < n_tokens; ++t) {
      std::memcpy(scales + t, rows + t * row_bytes_, sizeof(float));
      all_ordinary &= std::fabs(scales[t]) <= kLargestValue;
    }
    if (!all_ordinary) return false;
    kernels.unpack_int8(rows, n_tokens, d, bytes_of(codes_), ahead);
  }
  for (int64_t q = 0; q < queries_.source.n_queries; ++q) {
    for (int64_t s = 0; s < queries_.strips; s += kMaxStrips) {
      const int64_t n_strips = std::min(kMaxStrips, queries_.strips - s);
      kernels.block_max(queries_.strip(q, s), n_strips, bytes_of(codes_), scales, n_tokens, d,
                        running + (q * queries_.strips + s) * kLanes);
    }
  }
  return true;
}

}  // namespace espnx
