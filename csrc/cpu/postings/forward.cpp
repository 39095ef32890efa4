// See forward.hpp.
#include "forward.hpp"

#include <algorithm>
#include <cstring>

#include "cpu/crc32c.hpp"

namespace espnx::postings {
namespace {

constexpr int64_t kHeaderBytes = sizeof(ForwardHeader);

uint32_t number_at(const uint8_t* p, int bytes) {
  uint32_t number = 0;
  std::memcpy(&number, p, bytes);
  return number;
}

}  // namespace

void write_forward(const ForwardRules& rules, uint32_t number, const uint32_t* terms,
                   const uint32_t* values, int64_t n, uint8_t* out, int64_t size) {
  const int value_bytes = rules.kind == ValueKind::kFloat ? 4 : 1;
  std::memset(out, 0, size);
  ForwardHeader header{0, rules.salt, number, static_cast<uint32_t>(n)};
  uint8_t* at = out + kHeaderBytes;
  for (int64_t i = 0; i < n; ++i, at += rules.term_bytes)
    std::memcpy(at, terms + i, rules.term_bytes);
  for (int64_t i = 0; i < n; ++i, at += value_bytes) std::memcpy(at, values + i, value_bytes);
  std::memcpy(out, &header, sizeof(header));
  header.crc32c = crc32c(0, out + 4, size - 4);
  std::memcpy(out, &header, sizeof(header));
}

ForwardQuery::ForwardQuery(const uint32_t* terms, const double* weights, int64_t n)
    : parts_(n), has_(n) {
  for (int64_t i = 0; i < n; ++i) {
    wanted_.push_back({terms[i], i});
    weights_.push_back(static_cast<float>(weights[i]));
  }
  std::sort(wanted_.begin(), wanted_.end(), [](const Wanted& a, const Wanted& b) {
    return a.term != b.term ? a.term < b.term : a.place < b.place;
  });
}

bool ForwardQuery::score(const ForwardRules& rules, uint32_t number, Bytes bytes, float* out,
                         const char** why) {
  ForwardHeader header;
  *why = "it is shorter than a record";
  if (bytes.size < kHeaderBytes) return false;
  std::memcpy(&header, bytes.data, sizeof(header));
  *why = "it is of another segment, or was never written";
  if (header.salt != rules.salt) return false;
  *why = "its checksum does not fit";
  if (header.crc32c != crc32c(0, bytes.data + 4, bytes.size - 4)) return false;
  *why = "it is another record's";
  if (header.record != number) return false;
  *why = "its sizes do not fit";
  if (kHeaderBytes + header.terms * row_bytes(rules) > bytes.size) return false;
  const uint8_t* terms = bytes.data + kHeaderBytes;
  const uint8_t* values = terms + static_cast<int64_t>(header.terms) * rules.term_bytes;
  std::fill(has_.begin(), has_.end(), 0);
  auto next = wanted_.begin();
  for (uint32_t i = 0; i < header.terms && next != wanted_.end(); ++i) {
    const uint32_t term =
        number_at(terms + static_cast<int64_t>(i) * rules.term_bytes, rules.term_bytes);
    while (next != wanted_.end() && next->term < term) ++next;
    for (; next != wanted_.end() && next->term == term; ++next) {
      float value;
      if (rules.kind == ValueKind::kFloat) {
        std::memcpy(&value, values + static_cast<int64_t>(i) * 4, sizeof(value));
      } else {
        value = static_cast<float>(values[i]);
      }
      parts_[next->place] = weights_[next->place] * value;
      has_[next->place] = 1;
    }
  }
  float sum = -0.0f;  // as a scan begins
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (has_[i] != 0) sum += parts_[i] + 0.0f;
  }
  *out = sum + 0.0f;
  return true;
}

}  // namespace espnx::postings
