// See plan.hpp.
#include "plan.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace espnx::postings {
namespace {

int64_t bits_of(double value) {
  int64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Weighs the terms, and strikes those that no record has.
void weigh(const std::vector<Dictionary>& segments, const TermRule& rule, const BatchTerms& batch,
           int64_t* numbers, PlannedLists& plan) {
  plan.weights.assign(batch.n_terms, 0.0);
  plan.absent.assign(batch.n_terms, 0.0f);
  const auto n_segments = static_cast<int64_t>(segments.size());
  for (int64_t term = 0; term < batch.n_terms; ++term) {
    int64_t df = 0;
    for (int64_t i = 0; i < n_segments; ++i) {
      const int64_t number = numbers[i * batch.n_terms + term];
      if (number >= 0) df += segments[i].records(number);
    }
    if (df <= 0) {
      for (int64_t i = 0; i < n_segments; ++i) numbers[i * batch.n_terms + term] = -1;
    }
    if (n_segments == 0 || segments[0].kind != ValueKind::kCount) {
      plan.weights[term] = 1;
    } else if (df > 0) {
      const double idf = rule.idf(std::min(df, rule.n_records));
      plan.weights[term] = static_cast<float>(idf);
      plan.absent[term] = static_cast<float>(idf * rule.absent_part);
    }
  }
}

}  // namespace

std::pair<int64_t, int64_t> Dictionary::find(uint64_t hash) const {
  const auto range = std::equal_range(hashes, hashes + n_terms, hash);
  return {range.first - hashes, range.second - range.first};
}

int64_t Dictionary::records(int64_t term) const {
  const int64_t* place = std::lower_bound(removed, removed + n_removed, term);
  const bool is_removed = place != removed + n_removed && *place == term;
  return static_cast<int64_t>(df[term]) - (is_removed ? removed_df[place - removed] : 0);
}

double Dictionary::step(int64_t term) const {
  return exponents == nullptr ? 1.0 : std::ldexp(1.0, exponents[term]);
}

double TermRule::idf(int64_t df) const {
  const auto n = static_cast<double>(n_records), d = static_cast<double>(df);
  switch (variant) {
    case Variant::kRobertson: return std::log(std::max(1.0, (n - d + 0.5) / (d + 0.5)));
    case Variant::kLucene: return std::log(1 + (n - d + 0.5) / (d + 0.5));
    case Variant::kAtire: return std::log(n / d);
    case Variant::kBm25L: return std::log((n + 1) / (d + 0.5));
    case Variant::kBm25Plus: break;
  }
  return std::log((n + 1) / d);
}

PlannedLists plan_lists(const std::vector<Dictionary>& segments, const TermRule& rule,
                        const BatchTerms& batch, int64_t* numbers) {
  PlannedLists plan;
  weigh(segments, rule, batch, numbers, plan);
  const auto n_segments = static_cast<int64_t>(segments.size());
  plan.rows.reserve((batch.first_token[batch.n_queries]) * n_segments * kListColumns);
  for (int64_t query = 0; query < batch.n_queries; ++query) {
    for (int64_t i = 0; i < n_segments; ++i) {
      const Dictionary& held = segments[i];
      for (int64_t place = batch.first_token[query]; place < batch.first_token[query + 1];
           ++place) {
        const int64_t term = batch.tokens[place], number = numbers[i * batch.n_terms + term];
        if (number < 0) continue;
        const int64_t begin = static_cast<int64_t>(held.first[number]) * kListAlignBytes;
        const int64_t end = static_cast<int64_t>(held.first[number + 1]) * kListAlignBytes;
        const int64_t layer =
            held.first_layer == nullptr ? 0 : held.first_layer[number] * kListAlignBytes;
        const double own = batch.token_weights[place];
        const int64_t weight = bits_of(plan.weights[term] * own * held.step(number));
        const int64_t absent = bits_of(static_cast<double>(plan.absent[term]) * own);
        const int64_t row[kListColumns] = {i, number, begin,  end - begin, layer, 0,
                                           0, weight, absent, term,        query, place};
        plan.rows.insert(plan.rows.end(), row, row + kListColumns);
      }
    }
  }
  return plan;
}

}  // namespace espnx::postings
