// What a token format is, for C++. espnx/ops/maxsim/formats.py says the same for Python (a test
// holds them together). A further format is a value here, its name and size, and a decoder in each
// maxsim_decode_<level>.cpp.
#pragma once

#include <cstdint>
#include <cstring>

namespace espnx {

enum class TokenFormat : int {
  kFp32 = 0,
  kFp16,
  kBf16,
  kInt8,       // fp32 scale, then d codes: value = scale * code
  kBit1,       // d sign bits, lowest bit of a byte first: value = +-1 / sqrt(d)
  kResidual1,  // int32 centroid number, then d codes of 1, 2 or 4 bits as ColBERTv2 packs them
  kResidual2,
  kResidual4,
};
constexpr int kTokenFormats = 8;
constexpr const char* kTokenFormatNames[kTokenFormats] = {
    "fp32", "fp16", "bf16", "int8", "bit1", "residual1", "residual2", "residual4"};
constexpr int64_t kPrefixBytes =
    4;  // the scale of an int8 row, the centroid number of a residual one

// False where `name` is no format.
inline bool parse_token_format(const char* name, TokenFormat* format) {
  for (int i = 0; i < kTokenFormats; ++i) {
    if (std::strcmp(name, kTokenFormatNames[i]) == 0)
      return *format = static_cast<TokenFormat>(i), true;
  }
  return false;
}

// Bits of a residual code, 0 for other formats.
inline int residual_bits(TokenFormat format) {
  switch (format) {
    case TokenFormat::kResidual1: return 1;
    case TokenFormat::kResidual2: return 2;
    case TokenFormat::kResidual4: return 4;
    default: return 0;
  }
}

// Bytes of one token row of d values, d a multiple of 8.
inline int64_t token_row_bytes(TokenFormat format, int64_t d) {
  switch (format) {
    case TokenFormat::kFp32: return 4 * d;
    case TokenFormat::kFp16: return 2 * d;
    case TokenFormat::kBf16: return 2 * d;
    case TokenFormat::kInt8: return kPrefixBytes + d;
    case TokenFormat::kBit1: return d / 8;
    default: return kPrefixBytes + d / 8 * residual_bits(format);
  }
}

}  // namespace espnx
