// Included by each instruction set's file, which defines ESPNX_LEVEL, kWidth and load_halves.
// Vectors are the compiler's own: what an operator does to each lane is one rounding at every
// width.

constexpr int kTokens = 2 * kWidth;  // of which scores are made at a time

ESPNX_LEVEL inline Vec all(float x) {
  Vec out;
  for (int i = 0; i < kWidth; ++i) out[i] = x;
  return out;
}

ESPNX_LEVEL inline Vec load(const float* p) {
  Vec out;
  __builtin_memcpy(&out, p, sizeof(out));
  return out;
}

ESPNX_LEVEL inline void store(float* p, Vec a) { __builtin_memcpy(p, &a, sizeof(a)); }

// out[i][lane] = value i of row `lane`, as fp16: HILOS's transposition of a block of K on the chip.
// Rows come in eights.
ESPNX_LEVEL inline void transpose(const uint8_t* const* rows, uint16_t (*out)[kTokens]) {
  for (int first = 0; first < kTokens; first += 8) {
    for (int64_t i = 0; i < kDim; i += 8) {
#if defined(__SSE2__)
      __m128i row[8], pair[8], four[8];
      for (int r = 0; r < 8; ++r) {
        row[r] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[first + r] + 2 * i));
      }
      for (int r = 0; r < 4; ++r) {
        pair[r] = _mm_unpacklo_epi16(row[2 * r], row[2 * r + 1]);
        pair[4 + r] = _mm_unpackhi_epi16(row[2 * r], row[2 * r + 1]);
      }
      for (int h = 0; h < 8; h += 4) {
        four[h] = _mm_unpacklo_epi32(pair[h], pair[h + 1]);
        four[h + 1] = _mm_unpackhi_epi32(pair[h], pair[h + 1]);
        four[h + 2] = _mm_unpacklo_epi32(pair[h + 2], pair[h + 3]);
        four[h + 3] = _mm_unpackhi_epi32(pair[h + 2], pair[h + 3]);
      }
      for (int c = 0; c < 8; ++c) {
        const __m128i low = four[c / 4 * 4 + c / 2 % 2], high = four[c / 4 * 4 + c / 2 % 2 + 2];
        const __m128i column =
            c % 2 == 0 ? _mm_unpacklo_epi64(low, high) : _mm_unpackhi_epi64(low, high);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(&out[i + c][first]), column);
      }
#else
      for (int r = 0; r < 8; ++r) {
        uint16_t part[8];
        std::memcpy(part, rows[first + r] + 2 * i, sizeof(part));
        for (int c = 0; c < 8; ++c) out[i + c][first + r] = part[c];
      }
#endif
    }
  }
}

template <int kQueries>
ESPNX_LEVEL void score_tokens(const float* queries, const uint16_t (*k)[kTokens], float scale,
                              float* out) {
  Vec sum[kQueries][2] = {};
  for (int64_t i = 0; i < kDim; ++i) {
    const Vec low = load_halves(k[i]), high = load_halves(k[i] + kWidth);
    for (int j = 0; j < kQueries; ++j) {
      const Vec q = all(queries[j * kDim + i]);
      sum[j][0] = sum[j][0] + q * low;
      sum[j][1] = sum[j][1] + q * high;
    }
  }
  for (int j = 0; j < kQueries; ++j) {
    store(out + j * kBlock, sum[j][0] * all(scale));
    store(out + j * kBlock + kWidth, sum[j][1] * all(scale));
  }
}

template <int kQueries>
ESPNX_LEVEL void score_rows(const float* queries, const uint8_t* const* rows, int64_t n_rows,
                            float scale, float* out) {
  alignas(64) uint16_t k[kDim][kTokens];
  const uint8_t* some[kTokens];
  for (int64_t first = 0; first < n_rows; first += kTokens) {
    for (int64_t t = 0; t < kTokens; ++t)
      some[t] = rows[first + t < n_rows ? first + t : n_rows - 1];
    transpose(some, k);
    score_tokens<kQueries>(queries, k, scale, out + first);
  }
}

template <int kQueries>
ESPNX_LEVEL void add_value_rows(const float* p, const uint8_t* const* rows, int64_t n_rows,
                                const uint8_t* skipped, float* o) {
  for (int64_t c = 0; c < kDim; c += 2 * kWidth) {
    Vec sum[kQueries][2];
    for (int j = 0; j < kQueries; ++j)
      sum[j][0] = load(o + j * kDim + c), sum[j][1] = load(o + j * kDim + c + kWidth);
    for (int64_t t = 0; t < n_rows; ++t) {
      uint16_t halves[2 * kWidth];
      __builtin_memcpy(halves, rows[t] + 2 * c, sizeof(halves));
      const Vec low = load_halves(halves), high = load_halves(halves + kWidth);
      const unsigned skip = skipped[t];
      for (int j = 0; j < kQueries; ++j) {
        if ((skip >> j & 1U) != 0) continue;
        const Vec weight = all(p[j * kBlock + t]);
        sum[j][0] = sum[j][0] + weight * low;
        sum[j][1] = sum[j][1] + weight * high;
      }
    }
    for (int j = 0; j < kQueries; ++j)
      store(o + j * kDim + c, sum[j][0]), store(o + j * kDim + c + kWidth, sum[j][1]);
  }
}

ESPNX_LEVEL void score(const float* queries, int64_t n_queries, const uint8_t* const* rows,
                       int64_t n_rows, float scale, float* out) {
  static_assert(kGroup == 5 && kBlock % kTokens == 0 && kDim % kTokens == 0);
  switch (n_queries) {
    case 1: return score_rows<1>(queries, rows, n_rows, scale, out);
    case 2: return score_rows<2>(queries, rows, n_rows, scale, out);
    case 3: return score_rows<3>(queries, rows, n_rows, scale, out);
    case 4: return score_rows<4>(queries, rows, n_rows, scale, out);
    default: return score_rows<5>(queries, rows, n_rows, scale, out);
  }
}

ESPNX_LEVEL void exponentials(const float* x, float m, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = exponential(x[i] - m);
}

ESPNX_LEVEL void add_values(const float* p, int64_t n_queries, const uint8_t* const* rows,
                            int64_t n_rows, const uint8_t* skipped, float* o) {
  switch (n_queries) {
    case 1: return add_value_rows<1>(p, rows, n_rows, skipped, o);
    case 2: return add_value_rows<2>(p, rows, n_rows, skipped, o);
    case 3: return add_value_rows<3>(p, rows, n_rows, skipped, o);
    case 4: return add_value_rows<4>(p, rows, n_rows, skipped, o);
    default: return add_value_rows<5>(p, rows, n_rows, skipped, o);
  }
}

constexpr Kernels kTable{&score, &exponentials, &add_values};
