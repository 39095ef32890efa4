#include "record_score.hpp"

#include <algorithm>
#include <cstring>

#include "cpu/crc32c.hpp"
#include "records.hpp"

namespace espnx {
namespace {

constexpr int64_t kHeaderBytes = 16;
constexpr uint8_t kMagic = 0xE5;

template <typename T>
T load(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

}  // namespace

int64_t find_damaged(const RecordRules& rules, const RecordItems& records,
                     const std::vector<int64_t>& items) {
  for (const int64_t item : items) {
    const int64_t number = records.numbers[item], at = records.position_bytes[item];
    const int64_t n_tokens = records.n_tokens[number], size = rules.shape.size_bytes(n_tokens);
    if (at < 0 || at > records.memory_bytes || size > records.memory_bytes - at) return item;
    const uint8_t* record = records.memory + at;
    const bool is_right = load<uint16_t>(record + 4) == n_tokens && record[6] == rules.format &&
                          record[7] == kMagic &&
                          load<uint64_t>(record + 8) == static_cast<uint64_t>(number);
    if (!is_right || crc32c(rules.salt, record + 4, size - 4) != load<uint32_t>(record))
      return item;
  }
  return -1;
}

RecordScorer::RecordScorer(const RecordRules& rules, const RecordItems& records,
                           std::vector<RecordQuery> queries, RecordPairs pairs, int max_threads,
                           float* scores)
    : rules_(rules),
      records_(records),
      queries_(std::move(queries)),
      pairs_(pairs),
      max_threads_(max_threads),
      scores_(scores) {}

int64_t RecordScorer::score(const std::vector<int64_t>& items) {
  if (pairs_.item == nullptr) {
    return score_query(0, items.data(), items.data(), static_cast<int64_t>(items.size()));
  }
  std::vector<int64_t> found;
  for (const int64_t item : items) {
    const int64_t* begin = std::lower_bound(pairs_.item, pairs_.item + pairs_.count, item);
    for (; begin != pairs_.item + pairs_.count && *begin == item; ++begin)
      found.push_back(begin - pairs_.item);
  }
  std::sort(found.begin(), found.end(), [&](int64_t a, int64_t b) {
    return pairs_.query[a] != pairs_.query[b] ? pairs_.query[a] < pairs_.query[b] : a < b;
  });
  std::vector<int64_t> wanted(found.size());
  std::transform(found.begin(), found.end(), wanted.begin(),
                 [&](int64_t pair) { return pairs_.item[pair]; });
  for (size_t begin = 0, end = 0; begin < found.size(); begin = end) {
    const int64_t query = pairs_.query[found[begin]];
    while (end < found.size() && pairs_.query[found[end]] == query) ++end;
    const int64_t unknown = score_query(query, found.data() + begin, wanted.data() + begin,
                                        static_cast<int64_t>(end - begin));
    if (unknown >= 0) return unknown;
  }
  return -1;
}

// Scores go to scores_[slots[i]].
int64_t RecordScorer::score_query(int64_t query, const int64_t* slots, const int64_t* items,
                                  int64_t count) {
  const RecordQuery& q = queries_[query];
  offsets_.resize(count);
  counts_.resize(count);
  maxsim_.resize(count);
  for (int64_t i = 0; i < count; ++i) {
    offsets_[i] = records_.position_bytes[items[i]] + rules_.shape.fixed_bytes;
    counts_[i] = records_.n_tokens[records_.numbers[items[i]]];
  }
  const MaxsimDocuments tokens{
      records_.memory, records_.memory_bytes, offsets_.data(), counts_.data(),
      count,           rules_.tokens,         rules_.codebook};
  const int64_t unknown =
      maxsim({q.tokens, 1, q.n_tokens, rules_.dim}, tokens, max_threads_, maxsim_.data());
  if (unknown >= 0) return items[unknown];
  // A sum over no maxima: such a document is ranked by its CLS vector.
  for (int64_t i = 0; i < count; ++i) {
    if (counts_[i] == 0) maxsim_[i] = 0.0f;
  }
  if (rules_.d_cls > 0 && q.cls_weight != 0.0f) {
    cls_.resize(count);
    for (int64_t i = 0; i < count; ++i) {
      offsets_[i] = records_.position_bytes[items[i]] + kHeaderBytes;
      counts_[i] = 1;
    }
    maxsim({q.cls, 1, 1, rules_.d_cls},
           {records_.memory,
            records_.memory_bytes,
            offsets_.data(),
            counts_.data(),
            count,
            rules_.cls,
            {}},
           max_threads_, cls_.data());
    for (int64_t i = 0; i < count; ++i) maxsim_[i] += q.cls_weight * cls_[i];
  }
  for (int64_t i = 0; i < count; ++i) scores_[slots[i]] = maxsim_[i];
  return -1;
}

}  // namespace espnx
