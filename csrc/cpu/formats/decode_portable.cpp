// Decoders in plain C++, and the tables that all of them share.
#include <algorithm>
#include <cmath>

#include "decode.hpp"
#include "half.hpp"
#include "scale.hpp"

namespace espnx {
namespace {

bool decode_fp32(const RowDecoder& decoder, const uint8_t* rows, int64_t n_tokens, float* out) {
  std::memcpy(out, rows, static_cast<size_t>(n_tokens * decoder.row_bytes));
  return true;
}

bool decode_fp16(const RowDecoder& decoder, const uint8_t* rows, int64_t n_tokens, float* out) {
  for (int64_t i = 0; i < n_tokens * decoder.d; ++i) {
    uint16_t half;
    std::memcpy(&half, rows + 2 * i, sizeof(half));
    out[i] = half_to_float(half);
  }
  return true;
}

bool decode_bf16(const RowDecoder& decoder, const uint8_t* rows, int64_t n_tokens, float* out) {
  for (int64_t i = 0; i < n_tokens * decoder.d; ++i) {
    uint16_t high;
    std::memcpy(&high, rows + 2 * i, sizeof(high));
    const uint32_t bits = static_cast<uint32_t>(high) << 16;
    std::memcpy(out + i, &bits, sizeof(bits));
  }
  return true;
}

bool decode_int8(const RowDecoder& decoder, const uint8_t* rows, int64_t n_tokens, float* out) {
  for (int64_t t = 0; t < n_tokens; ++t, rows += decoder.row_bytes, out += decoder.d) {
    const float scale = scale_at(rows, 0);
    for (int64_t k = 0; k < decoder.d; ++k) {
      out[k] = scale * static_cast<float>(static_cast<int8_t>(rows[kPrefixBytes + k]));
    }
  }
  return true;
}

bool decode_bit1(const RowDecoder& decoder, const uint8_t* rows, int64_t n_tokens, float* out) {
  for (int64_t i = 0; i < n_tokens * decoder.row_bytes; ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      out[8 * i + bit] = (rows[i] >> bit & 1) != 0 ? decoder.sign_value : -decoder.sign_value;
    }
  }
  return true;
}

template <int kBits>
bool decode_residual(const RowDecoder& decoder, const uint8_t* rows, int64_t n_tokens, float* out) {
  for (int64_t t = 0; t < n_tokens; ++t, rows += decoder.row_bytes, out += decoder.d) {
    const float* centroid = centroid_of(decoder, rows);
    if (centroid == nullptr) return false;
    float squares[8] = {};
    for (int64_t k = 0; k < decoder.d; ++k) {
      const uint8_t byte = rows[kPrefixBytes + k * kBits / 8];
      const int shift = 8 - kBits * (1 + static_cast<int>(k % (8 / kBits)));
      out[k] = centroid[k] + decoder.weights[byte >> shift & ((1 << kBits) - 1)];
      squares[k % 8] += out[k] * out[k];
    }
    float sum = 0;
    for (const float square : squares) sum += square;
    const float norm = std::max(std::sqrt(sum), kTinyNorm);
    for (int64_t k = 0; k < decoder.d; ++k) out[k] /= norm;
  }
  return true;
}

int reversed_bits(int code, int bits) {
  int reversed = 0;
  for (int bit = 0; bit < bits; ++bit) reversed |= (code >> bit & 1) << (bits - 1 - bit);
  return reversed;
}

}  // namespace

RowDecoder::RowDecoder(TokenFormat format, int64_t d, const MaxsimCodebook& codebook)
    : format(format),
      d(d),
      row_bytes(token_row_bytes(format, d)),
      codebook(codebook),
      sign_value(static_cast<float>(1.0 / std::sqrt(static_cast<double>(d)))),
      weights{} {
  const int bits = residual_bits(format);
  if (bits == 0) return;
  for (int i = 0; i < 16; ++i)
    weights[i] = codebook.bucket_weights[reversed_bits(i % (1 << bits), bits)];
}

const DecodeTable kDecodePortable = {{decode_fp32, decode_fp16, decode_bf16, decode_int8,
                                      decode_bit1, decode_residual<1>, decode_residual<2>,
                                      decode_residual<4>}};

}  // namespace espnx
