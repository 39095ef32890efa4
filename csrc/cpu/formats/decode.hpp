// Rows of bytes to rows of fp32: one table of decoders per instruction set.
#pragma once

#include <cstdint>

#include "format.hpp"

namespace espnx {

// The codebook of residual formats; all null for others.
struct MaxsimCodebook {
  const float* centroids = nullptr;  // [n_centroids, d]
  int64_t n_centroids = 0;
  const float* bucket_weights = nullptr;  // [2^bits]
};

// What a decoder knows beside the bytes.
struct RowDecoder {
  RowDecoder(TokenFormat format, int64_t d, const MaxsimCodebook& codebook);

  TokenFormat format;
  int64_t d, row_bytes;
  MaxsimCodebook codebook;
  float sign_value;  // 1 / sqrt(d)
  // Bucket weights by a code's bits as they lie in the byte, the first one highest (ColBERT packs a
  // code's lowest bit first), repeated to 16 entries.
  float weights[16];
};

// Decodes n_tokens rows at `rows` (any alignment) to out[n_tokens, d]. False where a row names a
// centroid that is not in the codebook; nothing outside is read, and `out` is unspecified.
using Decode = bool (*)(const RowDecoder& decoder, const uint8_t* rows, int64_t n_tokens,
                        float* out);

struct DecodeTable {
  Decode of[kTokenFormats];
};

extern const DecodeTable kDecodePortable;
#if defined(__x86_64__)
extern const DecodeTable kDecodeAvx2;
extern const DecodeTable kDecodeAvx512;
#endif

// The centroid that a residual row names, or null.
inline const float* centroid_of(const RowDecoder& decoder, const uint8_t* row) {
  int32_t number;
  std::memcpy(&number, row, sizeof(number));
  if (number < 0 || number >= decoder.codebook.n_centroids) return nullptr;
  return decoder.codebook.centroids + number * decoder.d;
}

// Rows of residual formats are normalised as torch.nn.functional.normalize does it.
constexpr float kTinyNorm = 1e-12f;

}  // namespace espnx
