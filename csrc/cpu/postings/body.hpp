// Loops that a compiler makes vectors of by itself, for <level>.cpp: included inside an unnamed
// namespace, after ESPNX_LEVEL, the attribute that lets a function use the level's instructions.
// The folder is compiled without contraction (setup.py): every level gives the same bits. There is
// no include guard on purpose: each of those files compiles its own copy.

template <Variant kVariant>
ESPNX_LEVEL void bm25_of(const Bm25& rule, const uint32_t* records, const uint32_t* values,
                         int64_t n, double idf, double absent, float* out) {
  constexpr bool kHasFactor = kVariant == Variant::kAtire || kVariant == Variant::kBm25Plus;
  double norm[kBlockPostings];
  for (int64_t i = 0; i < n; ++i) norm[i] = rule.norms[rule.lengths[records[i]]];
  const double k1 = rule.k1, delta = rule.delta;
  // Products with a factor are float32's, as in bm25s, whose counts are float32.
  const float factor = static_cast<float>(k1 + 1);
  for (int64_t i = 0; i < n; ++i) {
    const auto count = static_cast<float>(static_cast<int32_t>(values[i]));
    const auto wide = static_cast<double>(count);
    double weight;
    if (kVariant == Variant::kBm25L) {
      const double c = wide / norm[i];
      weight = ((k1 + 1) * (c + delta)) / ((k1 + c) + delta);
    } else {
      const double above = kHasFactor ? static_cast<double>(count * factor) : wide;
      weight = above / (norm[i] + wide);
      if (kVariant == Variant::kBm25Plus) weight += delta;
    }
    out[i] = static_cast<float>(idf * weight - absent);
  }
}

ESPNX_LEVEL void bm25(const Bm25& rule, const uint32_t* records, const uint32_t* values, int64_t n,
                      double idf, double absent, float* out) {
  switch (rule.variant) {
    case Variant::kRobertson:
      return bm25_of<Variant::kRobertson>(rule, records, values, n, idf, absent, out);
    case Variant::kLucene:
      return bm25_of<Variant::kLucene>(rule, records, values, n, idf, absent, out);
    case Variant::kAtire:
      return bm25_of<Variant::kAtire>(rule, records, values, n, idf, absent, out);
    case Variant::kBm25L:
      return bm25_of<Variant::kBm25L>(rule, records, values, n, idf, absent, out);
    case Variant::kBm25Plus:
      return bm25_of<Variant::kBm25Plus>(rule, records, values, n, idf, absent, out);
  }
}
