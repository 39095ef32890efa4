// The loops behind AttentionKernels, written once over vectors of kWidth floats. Included by
// attention_<level>.cpp, inside an unnamed namespace, after the vector functions (v_load, v_fma,
// ...) and these names:
//   ESPNX_LEVEL   the attribute that lets a function use the level's instructions
//   Vec, kWidth   a vector, and how many floats it holds (8 or 16)
//   kIsFused      whether v_fma rounds once
//   kScoreQueries, kRowTile, kSumVectors    the shapes of register blocks
// There is no include guard on purpose: each of those files compiles its own copy.

// Loads `n` (8 or kWidth) values k.. of a row.
template <RowFormat kFormat>
ESPNX_LEVEL inline Vec load_some(const uint8_t* row, int64_t k, int64_t n) {
  return n >= kWidth ? v_decode<kFormat>(row, k) : v_decode_half<kFormat>(row, k);
}

ESPNX_LEVEL inline void prefetch(const uint8_t* bytes, int64_t n_bytes) {
  for (int64_t at = 0; at < n_bytes; at += 64) __builtin_prefetch(bytes + at, 0, 2);
}

template <RowFormat kFormat, int kQueries, int kRows>
ESPNX_LEVEL inline void score_block(const float* q, const uint8_t* rows, int64_t row_bytes,
                                    int64_t d, float* scores) {
  Vec sum[kQueries][kRows];
#pragma GCC unroll 4
  for (int i = 0; i < kQueries; ++i) {
#pragma GCC unroll 4
    for (int t = 0; t < kRows; ++t) sum[i][t] = v_set1(0.0f);
  }
  int64_t k = 0;
  for (; k + kWidth <= d; k += kWidth) {
    Vec row[kRows];
#pragma GCC unroll 4
    for (int t = 0; t < kRows; ++t) row[t] = v_decode<kFormat>(rows + t * row_bytes, k);
#pragma GCC unroll 4
    for (int i = 0; i < kQueries; ++i) {
      const Vec query = v_load(q + i * d + k);
#pragma GCC unroll 4
      for (int t = 0; t < kRows; ++t) sum[i][t] = v_fma(query, row[t], sum[i][t]);
    }
  }
  if (k < d) {
#pragma GCC unroll 4
    for (int t = 0; t < kRows; ++t) {
      const Vec row = v_decode_half<kFormat>(rows + t * row_bytes, k);
#pragma GCC unroll 4
      for (int i = 0; i < kQueries; ++i)
        sum[i][t] = v_fma(v_load_half(q + i * d + k), row, sum[i][t]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kQueries; ++i) {
    if (kRows == 4) {
      v_sum4(sum[i][0], sum[i][1 % kRows], sum[i][2 % kRows], sum[i][3 % kRows],
             scores + i * kTileRows);
    } else {
#pragma GCC unroll 4
      for (int t = 0; t < kRows; ++t) scores[i * kTileRows + t] = v_sum(sum[i][t]);
    }
  }
}

template <RowFormat kFormat, int kQueries>
ESPNX_LEVEL void score_some(const float* q, const RowSpan& span, int64_t d, float* scores) {
  const int64_t row_bytes = d * item_bytes(kFormat);
  int64_t t = 0;
  for (; t + 4 <= span.n; t += 4) {
    if (span.ahead != nullptr)
      prefetch(span.ahead + t * span.ahead_row_bytes, 4 * span.ahead_row_bytes);
    score_block<kFormat, kQueries, 4>(q, span.rows + t * row_bytes, row_bytes, d, scores + t);
  }
  for (; t < span.n; ++t)
    score_block<kFormat, kQueries, 1>(q, span.rows + t * row_bytes, row_bytes, d, scores + t);
}

template <RowFormat kFormat>
ESPNX_LEVEL void score_rows(const float* q, int64_t n_q, const RowSpan& span, int64_t d,
                            float* scores) {
  switch (n_q) {
    case 1: return score_some<kFormat, 1>(q, span, d, scores);
    case 2: return score_some<kFormat, 2>(q, span, d, scores);
    case 3: return score_some < kFormat, kScoreQueries<3 ? 1 : 3>(q, span, d, scores);
    default: return score_some < kFormat, kScoreQueries<4 ? 1 : 4>(q, span, d, scores);
  }
}

// Columns [c, c + kVectors * kWidth) of a task; with kHalf, half of one vector.
template <RowFormat kFormat, int kQueries, int kVectors, bool kHalf>
ESPNX_LEVEL inline void weigh_block(const WeighTask& task, int64_t c) {
  Vec sum[kQueries][kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kQueries; ++i) {
    const Vec alpha = v_set1(task.alpha[i]);
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      const float* o = task.o + i * task.o_stride + c + j * kWidth;
      sum[i][j] = v_mul(alpha, kHalf ? v_load_half(o) : v_load(o));
    }
  }
  const float* p = task.p;
  for (int64_t s = 0; s < task.n_spans; ++s) {
    const uint8_t* row = task.spans[s].rows;
    const uint8_t* ahead = c == 0 && task.is_first ? task.spans[s].ahead : nullptr;
    for (int64_t t = 0; t < task.spans[s].n; ++t, row += task.row_bytes, p += task.p_row_stride) {
      if (ahead != nullptr)
        prefetch(ahead + t * task.spans[s].ahead_row_bytes, task.spans[s].ahead_row_bytes);
      Vec value[kVectors];
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) {
        const int64_t k = task.column + c + j * kWidth;
        value[j] = kHalf ? v_decode_half<kFormat>(row, k) : v_decode<kFormat>(row, k);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kQueries; ++i) {
        const Vec weight = v_set1(p[i * task.p_query_stride]);
#pragma GCC unroll 8
        for (int j = 0; j < kVectors; ++j) sum[i][j] = v_fma(weight, value[j], sum[i][j]);
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kQueries; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      float* out = task.out + i * task.out_stride + c + j * kWidth;
      kHalf ? v_store_half(out, sum[i][j]) : v_store(out, sum[i][j]);
    }
  }
}

template <RowFormat kFormat, int kQueries>
ESPNX_LEVEL void weigh_some(const WeighTask& task) {
  constexpr int kVectors =
      kSumVectors / kQueries > 8 ? 8 : kSumVectors / (kQueries == 3 ? 4 : kQueries);
  int64_t c = 0;
  for (; c + kVectors * kWidth <= task.n_columns; c += kVectors * kWidth) {
    weigh_block<kFormat, kQueries, kVectors, false>(task, c);
  }
  if (kVectors > 4) {
    for (; c + 4 * kWidth <= task.n_columns; c += 4 * kWidth)
      weigh_block<kFormat, kQueries, 4, false>(task, c);
  }
  for (; c + kWidth <= task.n_columns; c += kWidth)
    weigh_block<kFormat, kQueries, 1, false>(task, c);
  if (c < task.n_columns) weigh_block<kFormat, kQueries, 1, true>(task, c);
}

template <RowFormat kFormat>
ESPNX_LEVEL void weigh(const WeighTask& task, int64_t n_q) {
  switch (n_q) {
    case 1: return weigh_some<kFormat, 1>(task);
    case 2: return weigh_some<kFormat, 2>(task);
    case 3: return weigh_some<kFormat, 3>(task);
    default: return weigh_some<kFormat, 4>(task);
  }
}

template <RowFormat kFormat>
ESPNX_LEVEL void decode(const DecodeTask& task) {
  const bool is_int8 = kFormat == RowFormat::int8;
  for (int64_t t = 0; t < task.span.n; ++t) {
    const uint8_t* row = task.span.rows + t * task.row_bytes;
    float* out = task.out + t * task.out_stride;
    Vec scale = v_set1(1.0f);
    if (is_int8 && task.scales_are_of_rows) scale = v_set1(scale_at(task.span.scales, t));
    for (int64_t k = 0; k < task.n_columns; k += kWidth) {
      const int64_t column = task.column + k, n = task.n_columns - k;
      Vec value = load_some<kFormat>(row, column, n);
      if (is_int8) {
        Vec by = scale;
        if (!task.scales_are_of_rows) {
          by = load_some<RowFormat::fp32>(task.span.scales, column, n);
          by = v_add(by, v_sub(by, by));  // scale_or_nan
        }
        value = v_mul(value, by);
      }
      n >= kWidth ? v_store(out + k, value) : v_store_half(out + k, value);
    }
  }
}

ESPNX_LEVEL float row_max(const float* scores, int64_t n) {
  Vec best = v_set1(-INFINITY);
  for (int64_t t = 0; t < n; t += kWidth) best = v_max(v_load(scores + t), best);
  return v_largest(best);
}

// exp(x) for x <= 0 and NaN; 0 where it would be below 2^-126. Cephes' polynomial: within 2 units
// in the last place.
ESPNX_LEVEL inline Vec v_exp(Vec x) {
  const Vec lowest = v_set1(-87.33654f);
  const Vec inside = v_max(lowest, x);  // the second operand where it is NaN
  const Vec whole = v_round(v_mul(inside, v_set1(1.44269504088896341f)));
  const Vec rest =
      v_fma(whole, v_set1(2.12194440e-4f), v_fma(whole, v_set1(-0.693359375f), inside));
  Vec sum = v_set1(1.9875691500e-4f);
  sum = v_fma(sum, rest, v_set1(1.3981999507e-3f));
  sum = v_fma(sum, rest, v_set1(8.3334519073e-3f));
  sum = v_fma(sum, rest, v_set1(4.1665795894e-2f));
  sum = v_fma(sum, rest, v_set1(1.6666665459e-1f));
  sum = v_fma(sum, rest, v_set1(5.0000001201e-1f));
  sum = v_fma(v_mul(sum, rest), rest, rest);
  return v_zero_below(x, lowest, v_scale(v_add(sum, v_set1(1.0f)), whole));
}

ESPNX_LEVEL float row_exp(float* scores, int64_t n, float m) {
  const Vec peak = v_set1(m);
  Vec sum = v_set1(0.0f);
  for (int64_t t = 0; t < n; t += kWidth) {
    const Vec p = v_exp(v_sub(v_load(scores + t), peak));
    v_store(scores + t, p);
    sum = v_add(sum, p);
  }
  return v_sum(sum);
}

// tanh x = (1 - e) / (1 + e) for e = exp(-2 |x|), with the sign of x.
ESPNX_LEVEL void soft_cap(float* scores, int64_t n, float cap) {
  const Vec by = v_set1(1.0f / cap), one = v_set1(1.0f), zero = v_set1(0.0f), scale = v_set1(cap);
  for (int64_t t = 0; t < n; t += kWidth) {
    const Vec x = v_mul(v_load(scores + t), by);
    const Vec e = v_exp(v_mul(v_set1(-2.0f), v_max(v_sub(zero, x), x)));
    v_store(scores + t, v_mul(scale, v_signed_as(v_div(v_sub(one, e), v_add(one, e)), x)));
  }
}

// Rows [t, t + kRows) of a task.
template <int kRows, int kStrips>
ESPNX_LEVEL inline void strip_block(const StripTask& task, int64_t t) {
  const float* rows = task.rows + t * task.row_stride;
  const float* strips = task.strips;
  float* scores = task.scores + t * kWidth;
  const int64_t row_stride = task.row_stride, strip_stride = task.strip_stride, n_k = task.n_k;
  const uint8_t* ahead = task.ahead + t * n_k * task.ahead_step_bytes;
  const int64_t ahead_step_bytes = kRows * task.ahead_step_bytes;
  Vec sum[kRows][kStrips];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int s = 0; s < kStrips; ++s) {
      sum[i][s] = task.add ? v_load(scores + (s * kTileRows + i) * kWidth) : v_set1(0.0f);
    }
  }
  for (int64_t k = 0; k < n_k; ++k) {
    __builtin_prefetch(ahead + k * ahead_step_bytes, 0, 2);
    Vec query[kStrips];
#pragma GCC unroll 2
    for (int s = 0; s < kStrips; ++s) query[s] = v_load(strips + s * strip_stride + k * kWidth);
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const Vec value = v_set1(rows[i * row_stride + k]);
#pragma GCC unroll 2
      for (int s = 0; s < kStrips; ++s) sum[i][s] = v_fma(value, query[s], sum[i][s]);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int s = 0; s < kStrips; ++s) v_store(scores + (s * kTileRows + i) * kWidth, sum[i][s]);
  }
}

template <int kStrips>
ESPNX_LEVEL void score_strips_of(const StripTask& task) {
  int64_t t = 0;
  for (; t + kRowTile <= task.n_rows; t += kRowTile) strip_block<kRowTile, kStrips>(task, t);
  for (; t + 4 <= task.n_rows; t += 4) strip_block<4, kStrips>(task, t);
  for (; t < task.n_rows; ++t) strip_block<1, kStrips>(task, t);
}

ESPNX_LEVEL void score_strips(const StripTask& task, int64_t n_strips) {
  n_strips == 2 ? score_strips_of<2>(task) : score_strips_of<1>(task);
}

ESPNX_LEVEL void strip_softmax(float* scores, int64_t n, float* m, float* l, float* alpha) {
  const Vec before = v_load(m);
  Vec best = before;
  for (int64_t t = 0; t < n; ++t) best = v_max(v_load(scores + t * kWidth), best);
  // A query that has seen no row yet has no peak to subtract.
  const Vec peak = v_zero_below(best, v_set1(-FLT_MAX), best);
  const Vec scale = v_exp(v_sub(before, peak));
  Vec sum = v_mul(v_load(l), scale);
  Vec added = v_set1(0.0f);
  for (int64_t t = 0; t < n; ++t) {
    const Vec p = v_exp(v_sub(v_load(scores + t * kWidth), peak));
    v_store(scores + t * kWidth, p);
    added = v_add(added, p);
  }
  sum = v_add(sum, added);
  v_store(m, best);
  v_store(l, sum);
  v_store(alpha, scale);
}

// Four sums at a time: one after the other each would wait for the one before.
ESPNX_LEVEL void strip_sum(const float* p, int64_t n, float* sums) {
  constexpr int kChains = 4;
  Vec part[kChains];
  for (Vec& each : part) each = v_set1(0.0f);
  int64_t t = 0;
  for (; t + kChains <= n; t += kChains) {
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) part[c] = v_add(part[c], v_load(p + (t + c) * kWidth));
  }
  for (; t < n; ++t) part[0] = v_add(part[0], v_load(p + t * kWidth));
  v_store(sums, v_add(v_add(part[0], part[2]), v_add(part[1], part[3])));
}

constexpr AttentionKernels kTable = {
    kWidth,
    kScoreQueries,
    kIsFused,
    {nullptr, score_rows<RowFormat::fp32>, score_rows<RowFormat::fp16>, score_rows<RowFormat::bf16>,
     score_rows<RowFormat::int8>},
    {nullptr, weigh<RowFormat::fp32>, weigh<RowFormat::fp16>, weigh<RowFormat::bf16>,
     weigh<RowFormat::int8>},
    {nullptr, decode<RowFormat::fp32>, decode<RowFormat::fp16>, decode<RowFormat::bf16>,
     decode<RowFormat::int8>},
    row_max,
    row_exp,
    soft_cap,
    score_strips,
    strip_softmax,
    strip_sum,
};
