// What a token format is, for C++. espnx/ops/maxsim/formats.py says the same for Python (a test holds them
// together). A further format is a value here, its size, and a decoder in each maxsim_<level>.cpp.
#pragma once

#include <cstdint>
#include <cstring>

namespace espnx {

enum class TokenFormat : int { kFp32 = 0, kFp16 = 1 };
constexpr int kTokenFormats = 2;

// False where `name` is no format.
inline bool parse_token_format(const char* name, TokenFormat* format) {
  if (std::strcmp(name, "fp32") == 0) return *format = TokenFormat::kFp32, true;
  if (std::strcmp(name, "fp16") == 0) return *format = TokenFormat::kFp16, true;
  return false;
}

// Bytes of one token row of d values.
inline int64_t token_row_bytes(TokenFormat format, int64_t d) {
  switch (format) {
    case TokenFormat::kFp32: return 4 * d;
    case TokenFormat::kFp16: return 2 * d;
  }
  return 0;
}

}  // namespace espnx
