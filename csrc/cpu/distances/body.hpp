// The loops behind DistanceKernel, written once over vectors of values. Included by <level>.cpp,
// inside an unnamed namespace, after ESPNX_LEVEL, the attribute that lets a function use the
// level's instructions, and after a struct for each format (`V` below) with
//   Value, Sum      values of a step, widened; sums of their products
//   kStep           values of a step
//   query(q, k)     values k.. of the padded query
//   load(row, k)    values k.. of a vector in place; some(row, k, n): the last n < kStep, and zeros
//   sub(a, b), dot(sum, a, b), zero(), total(sum)
// There is no include guard on purpose: each of those files compiles its own copy.

// Vectors whose sums are in flight at a time: one sum's additions would wait for each other.
constexpr int kTile = 4;
constexpr int64_t kLineBytes = 64;

template <typename V, Metric kMetric>
ESPNX_LEVEL inline typename V::Sum add_step(typename V::Sum sum, typename V::Value q,
                                            typename V::Value v) {
  if (kMetric == Metric::kIp) return V::dot(sum, q, v);
  const auto difference = V::sub(q, v);
  return V::dot(sum, difference, difference);
}

template <typename V, Metric kMetric, int kRows>
ESPNX_LEVEL inline void measure_tile(const void* query, const uint8_t* const* rows, int64_t d,
                                     float* out) {
  typename V::Sum sum[kRows];
#pragma GCC unroll 4
  for (int t = 0; t < kRows; ++t) sum[t] = V::zero();
  int64_t k = 0;
  for (; k + V::kStep <= d; k += V::kStep) {
    const auto q = V::query(query, k);
#pragma GCC unroll 4
    for (int t = 0; t < kRows; ++t) sum[t] = add_step<V, kMetric>(sum[t], q, V::load(rows[t], k));
  }
  if (k < d) {
    const auto q = V::query(query, k);
#pragma GCC unroll 4
    for (int t = 0; t < kRows; ++t)
      sum[t] = add_step<V, kMetric>(sum[t], q, V::some(rows[t], k, d - k));
  }
#pragma GCC unroll 4
  for (int t = 0; t < kRows; ++t) {
    const auto total = static_cast<float>(V::total(sum[t]));
    out[t] = kMetric == Metric::kIp ? 0.0f - total : total;  // 0 - 0 is 0, and not -0
  }
}

template <typename V, Metric kMetric>
ESPNX_LEVEL void measure(const void* query, const uint8_t* const* rows, int64_t n, int64_t d,
                         float* out) {
  const int64_t row_bytes = d * V::kValueBytes;
  for (; n >= kTile; n -= kTile, rows += kTile, out += kTile) {
    // The next tile's vectors may lie anywhere; of long ones the hardware sees by itself how they
    // go on.
    for (int t = 0; n >= 2 * kTile && t < kTile; ++t) {
      for (int64_t at = 0; at < row_bytes && at < 4 * kLineBytes; at += kLineBytes) {
        __builtin_prefetch(rows[kTile + t] + at);
      }
    }
    measure_tile<V, kMetric, kTile>(query, rows, d, out);
  }
  for (int64_t i = 0; i < n; ++i) measure_tile<V, kMetric, 1>(query, rows + i, d, out + i);
}

template <typename V>
constexpr DistanceKernel kL2Of = measure<V, Metric::kL2>;
template <typename V>
constexpr DistanceKernel kIpOf = measure<V, Metric::kIp>;
