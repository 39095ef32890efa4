// What the files of bindings of posting lists share: columns, names of terms, results.
#pragma once

#include <cstring>
#include <limits>
#include <vector>

#include "bindings.hpp"
#include "postings/search.hpp"

namespace espnx::python {

using namespace espnx::postings;  // NOLINT: of files of their bindings

inline ValueKind to_kind(int64_t kind) {
  if (kind < 0 || kind >= kValueKinds) invalid("unknown kind of values");
  return static_cast<ValueKind>(kind);
}

inline const uint32_t* whole_numbers(const Tensor& tensor, const char* name, int64_t n) {
  const auto* data = contiguous<const uint32_t>(tensor, Dtype::uint32, name, "uint32");
  if (tensor.numel() != n) invalid(std::string(name) + " must have one entry a posting");
  return data;
}

inline const uint8_t* bytes_of(const Tensor& tensor, const char* name) {
  return contiguous<const uint8_t>(tensor, Dtype::uint8, name, "uint8");
}

// Doubles come as the int64 of the same bits: the border knows no float64.
inline double as_double(int64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Names of terms: the bytes of each one after the other, and where each begins.
struct Names {
  Names(const Tensor& names, const Tensor& begin, int64_t count)
      : data(bytes_of(names, "names")), begin(to_vector(begin, "name_begin", count + 1)) {
    for (int64_t i = 0; i < count; ++i) {
      if (this->begin[i] < 0 || this->begin[i] > this->begin[i + 1] ||
          this->begin[i + 1] - this->begin[i] > kMaxTermBytes) {
        invalid("names must be in order, and at most 256 bytes each");
      }
    }
    if (this->begin[count] > names.numel()) invalid("names end early");
  }
  Bytes of(int64_t i) const { return {data + begin[i], begin[i + 1] - begin[i]}; }

  const uint8_t* data;
  std::vector<int64_t> begin;
};

// (numbers int64 [Q, k], -1 where there are fewer; scores float32 [Q, k]; costs int64 [Q, 3]:
// requests, bytes asked, bytes moved; places in `lists` of lists of other terms)
inline py::tuple to_results(const std::vector<QueryResult>& results, int64_t k) {
  const auto n = static_cast<int64_t>(results.size());
  auto numbers = std::make_shared<std::vector<int64_t>>(n * k, -1);
  NewFloats scores({n, k});
  scores.fill(-std::numeric_limits<float>::infinity());
  auto costs = std::make_shared<std::vector<int64_t>>();
  std::vector<int64_t> others;
  for (int64_t q = 0; q < n; ++q) {
    const QueryResult& result = results[q];
    for (size_t i = 0; i < result.hits.size(); ++i) {
      (*numbers)[q * k + i] = result.hits[i].number;
      scores.data()[q * k + i] = result.hits[i].score;
    }
    for (const int64_t each :
         {result.costs.requests, result.costs.bytes_asked, result.costs.bytes_moved}) {
      costs->push_back(each);
    }
    others.insert(others.end(), result.other_terms.begin(), result.other_terms.end());
  }
  return py::make_tuple(NewTensor(numbers->data(), Dtype::int64, {n, k}, numbers), scores.tensor(),
                        NewTensor(costs->data(), Dtype::int64, {n, 3}, costs),
                        to_tensor(std::move(others)));
}

void bind_postings_search(py::module_& m);

}  // namespace espnx::python
