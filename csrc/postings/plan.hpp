// Which lists a batch of queries wants, and what each counts: terms are looked up in the
// dictionaries of all segments and weighed by what is global. Beside a query's few reads this is
// what takes time, and far longer in Python.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "cpu/postings/kernels.hpp"
#include "cpu/postings/list.hpp"

namespace espnx::postings {

// A segment's terms in the order of their hashes, in memory of the caller's: see
// espnx/postings/stored/dictionary.py.
struct Dictionary {
  int64_t n_terms = 0;
  ValueKind kind = ValueKind::kCount;
  const uint64_t* hashes = nullptr;
  const uint32_t* first = nullptr;  // [n_terms + 1], in units of kListAlignBytes
  const uint32_t* df = nullptr;
  const uint16_t* first_layer = nullptr;  // in the same units; null: lists have one layer
  const int8_t* exponents = nullptr;  // of impacts: a step of a list is worth 2 to the power of it
  // Terms that deleted records had, ascending, and how many of those had them.
  const int64_t* removed = nullptr;
  const int64_t* removed_df = nullptr;
  int64_t n_removed = 0;

  // The first of the terms with this hash, and how many they are: 0 or 1, nearly always.
  std::pair<int64_t, int64_t> find(uint64_t hash) const;
  // Records that have a term, without those deleted.
  int64_t records(int64_t term) const;
  // What one step of a term's values is worth.
  double step(int64_t term) const;
};

// How BM25 weighs terms; of impacts nothing is asked of it.
struct TermRule {
  Variant variant = Variant::kLucene;
  int64_t n_records = 0;   // of all segments
  double absent_part = 0;  // of idf: what a record without the term gets

  // espnx/postings/bm25.py has the same, to the bit. `df` is 1 to n_records.
  double idf(int64_t df) const;
};

// Terms of a batch of queries, each once, and the queries as places among them.
struct BatchTerms {
  int64_t n_terms = 0, n_queries = 0;
  const int64_t* tokens = nullptr;  // of all queries
  const double* token_weights = nullptr;
  const int64_t* first_token = nullptr;  // [n_queries + 1]
};

constexpr int64_t kListColumns = 12;

struct PlannedLists {
  std::vector<double> weights;  // of each term
  std::vector<float> absent;    // of each term, before a query's weight
  // [lists, 12], by query, segment, and the order of the query's terms: segment, term,
  // offset_bytes, size_bytes, first_layer_bytes, whether the first layer alone is read, whether its
  // name is a digest (both 0 here), the bits of weight and absent, which of the batch's terms it
  // is, query, place among the tokens.
  std::vector<int64_t> rows;
};

// `numbers` [segments, n_terms]: of each term in each segment, -1 where it has none; those that
// deleted records alone had become -1.
PlannedLists plan_lists(const std::vector<Dictionary>& segments, const TermRule& rule,
                        const BatchTerms& batch, int64_t* numbers);

}  // namespace espnx::postings
