// Posting lists in Python: writing lists, reading one back, searching those of segments on storage.
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>

#include "bindings.hpp"
#include "cpu/postings/forward.hpp"
#include "postings/search.hpp"

namespace espnx::python {
namespace {

using namespace espnx::postings;  // NOLINT: a file of their bindings

ValueKind to_kind(int64_t kind) {
  if (kind < 0 || kind >= kValueKinds) invalid("unknown kind of values");
  return static_cast<ValueKind>(kind);
}

const uint32_t* whole_numbers(const Tensor& tensor, const char* name, int64_t n) {
  const auto* data = contiguous<const uint32_t>(tensor, Dtype::uint32, name, "uint32");
  if (tensor.numel() != n) invalid(std::string(name) + " must have one entry a posting");
  return data;
}

const uint8_t* bytes_of(const Tensor& tensor, const char* name) {
  return contiguous<const uint8_t>(tensor, Dtype::uint8, name, "uint8");
}

// Doubles come as the int64 of the same bits: the border knows no float64.
double as_double(int64_t bits) {
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

class PyListEncoder {
 public:
  PyListEncoder(uint32_t salt, int64_t kind) : encoder_(salt, to_kind(kind)) {}

  void begin_list(int64_t term, const Tensor& name, bool is_digest) {
    if (name.numel() > kMaxTermBytes) invalid("a name must be at most 256 bytes");
    encoder_.begin_list(static_cast<uint32_t>(term), {bytes_of(name, "name"), name.numel()}, is_digest);
  }

  void add(const Tensor& records, const Tensor& values) {
    const int64_t n = records.numel();
    const uint32_t* record = whole_numbers(records, "records", n);
    const uint32_t* value = whole_numbers(values, "values", n);
    py::gil_scoped_release unlocked;
    encoder_.add(record, value, n);
  }

  int64_t end_layer(bool is_last) { return encoder_.end_layer(is_last); }

  // Whole lists, of terms first_term, first_term + 1, ...: `counts` postings each, of which the first `first_counts`
  // are a layer of their own (0: there is one layer). (bytes of each list, bytes of its first layer or 0.)
  std::pair<NewTensor, NewTensor> add_lists(int64_t first_term, const Tensor& names, const Tensor& name_begin,
                                            const Tensor& digests, const Tensor& counts, const Tensor& first_counts,
                                            const Tensor& records, const Tensor& values) {
    const std::vector<int64_t> count = to_vector(counts, "counts", -1);
    const auto n_terms = static_cast<int64_t>(count.size());
    const std::vector<int64_t> first = to_vector(first_counts, "first_counts", n_terms);
    const Names name(names, name_begin, n_terms);
    const uint8_t* is_digest = bytes_of(digests, "digests");
    if (digests.numel() != n_terms) invalid("digests must have one entry a term");
    int64_t total = 0;
    for (int64_t i = 0; i < n_terms; ++i) {
      if (count[i] < 1 || first[i] < 0 || first[i] >= count[i]) invalid("a list must have postings in each layer");
      total += count[i];
    }
    const uint32_t* record = whole_numbers(records, "records", total);
    const uint32_t* value = whole_numbers(values, "values", total);
    std::vector<int64_t> sizes(n_terms), first_sizes(n_terms);
    {
      py::gil_scoped_release unlocked;
      for (int64_t i = 0; i < n_terms; ++i) {
        encoder_.begin_list(static_cast<uint32_t>(first_term + i), name.of(i), is_digest[i] != 0);
        if (first[i] > 0) {
          encoder_.add(record, value, first[i]);
          first_sizes[i] = encoder_.end_layer(false);
        }
        encoder_.add(record + first[i], value + first[i], count[i] - first[i]);
        sizes[i] = first_sizes[i] + encoder_.end_layer(true);
        record += count[i], value += count[i];
      }
    }
    return {to_tensor(std::move(sizes)), to_tensor(std::move(first_sizes))};
  }

  NewTensor take() {
    std::vector<uint8_t> bytes;
    bytes.swap(encoder_.bytes());
    return NewTensor::of(std::move(bytes), Dtype::uint8);
  }

 private:
  ListEncoder encoder_;
};

struct Decoded {
  ListFault fault = ListFault::kNone;
  const char* why = nullptr;
  std::vector<uint32_t> records, values;
  int64_t first = 0;  // postings of the first of two layers
};

Decoded decode(const StoredList& list, const ListRules& rules) {
  Decoded all;
  all.fault = check_list(list, rules, false, &all.why);
  if (all.fault != ListFault::kNone) return all;
  const auto layers = layers_of(list);
  uint32_t records[kBlockPostings], values[kBlockPostings];
  for (size_t i = 0; i < layers.size(); ++i) {
    ListReader reader(layers[i], rules);
    int64_t n;
    while ((n = reader.next(records, values)) > 0) {
      all.records.insert(all.records.end(), records, records + n);
      all.values.insert(all.values.end(), values, values + n);
    }
    if (n < 0) all.fault = ListFault::kDamaged, all.why = "its record numbers are out of order";
    if (i + 1 < layers.size()) all.first = static_cast<int64_t>(all.records.size());
  }
  return all;
}

// (records uint32 [n], values uint32 [n], postings of the first of two layers); a text that says what is wrong; or None
// for a list of another term.
py::object decode_list(const Tensor& list, int64_t salt, int64_t kind, int64_t n_records, int64_t term,
                       const Tensor& name, bool is_digest, int64_t first_layer_bytes) {
  const StoredList stored{static_cast<uint32_t>(term),
                          {bytes_of(list, "list"), list.numel()},
                          first_layer_bytes,
                          {bytes_of(name, "name"), name.numel()},
                          is_digest};
  const ListRules rules{static_cast<uint32_t>(salt), to_kind(kind), n_records};
  Decoded all;
  {
    py::gil_scoped_release unlocked;
    all = decode(stored, rules);
  }
  if (all.fault == ListFault::kOtherTerm) return py::none();
  if (all.fault == ListFault::kDamaged) return py::str(all.why);
  return py::make_tuple(NewTensor::of(std::move(all.records), Dtype::uint32),
                        NewTensor::of(std::move(all.values), Dtype::uint32), all.first);
}

// Whole lists of terms first_term, first_term + 1, ..., each where it lies in `buffer`, of which a dictionary says that
// they have `df` postings: (counts int64 [n], records uint32, values uint32, the first list that is damaged or -1, what
// is wrong with it). With `kept`, bit i % 8 of byte i / 8: postings of records that it says.
py::tuple read_lists(const Tensor& buffer, const Tensor& offset_bytes, const Tensor& size_bytes,
                     const Tensor& first_layer_bytes, const Tensor& names, const Tensor& name_begin,
                     const Tensor& digests, int64_t first_term, int64_t salt, int64_t kind, int64_t n_records,
                     const Tensor& df, const std::optional<Tensor>& kept) {
  const std::vector<int64_t> offset = to_vector(offset_bytes, "offset_bytes", -1);
  const auto n = static_cast<int64_t>(offset.size());
  const std::vector<int64_t> size = to_vector(size_bytes, "size_bytes", n);
  const std::vector<int64_t> first_layer = to_vector(first_layer_bytes, "first_layer_bytes", n);
  const std::vector<int64_t> expected = to_vector(df, "df", n);
  const Names name(names, name_begin, n);
  const uint8_t* is_digest = bytes_of(digests, "digests");
  const uint8_t* data = bytes_of(buffer, "buffer");
  const uint8_t* keep = kept ? bytes_of(*kept, "kept") : nullptr;
  if (digests.numel() != n || (kept && kept->numel() * 8 < n_records)) invalid("digests and kept must cover all");
  for (int64_t i = 0; i < n; ++i) {
    if (offset[i] < 0 || size[i] < 0 || offset[i] > buffer.numel() - size[i]) invalid("a list is not in the buffer");
  }
  const ListRules rules{static_cast<uint32_t>(salt), to_kind(kind), n_records};
  std::vector<uint32_t> records, values;
  std::vector<int64_t> counts(n);
  int64_t bad = -1;
  std::string why;
  {
    py::gil_scoped_release unlocked;
    for (int64_t i = 0; i < n && bad < 0; ++i) {
      const Decoded list = decode({static_cast<uint32_t>(first_term + i),
                                   {data + offset[i], size[i]},
                                   first_layer[i],
                                   name.of(i),
                                   is_digest[i] != 0},
                                  rules);
      if (list.fault == ListFault::kDamaged) bad = i, why = list.why;
      if (list.fault == ListFault::kOtherTerm) bad = i, why = "it is another term's";
      if (bad < 0 && static_cast<int64_t>(list.records.size()) != expected[i]) bad = i, why = "postings are missing";
      if (bad >= 0) break;
      const size_t before = records.size();
      for (size_t j = 0; j < list.records.size(); ++j) {
        const uint32_t record = list.records[j];
        if (keep != nullptr && (keep[record / 8] >> (record % 8) & 1) == 0) continue;
        records.push_back(record), values.push_back(list.values[j]);
      }
      counts[i] = static_cast<int64_t>(records.size() - before);
    }
  }
  return py::make_tuple(to_tensor(std::move(counts)), NewTensor::of(std::move(records), Dtype::uint32),
                        NewTensor::of(std::move(values), Dtype::uint32), bad, why);
}

ForwardRules forward_rules(int64_t salt, int64_t kind, int64_t term_bytes) {
  const ForwardRules rules{static_cast<uint32_t>(salt), to_kind(kind), static_cast<int>(term_bytes)};
  if (rules.kind == ValueKind::kCount || (term_bytes != 2 && term_bytes != 4)) invalid("no such forward records");
  return rules;
}

// uint8 [total]: forward records of `first`, first + 1, ..., each at its offset.
NewTensor write_forward_records(int64_t salt, int64_t kind, int64_t term_bytes, int64_t first, const Tensor& counts,
                                const Tensor& terms, const Tensor& values, const Tensor& offset_bytes,
                                const Tensor& size_bytes, int64_t total) {
  const ForwardRules rules = forward_rules(salt, kind, term_bytes);
  const std::vector<int64_t> count = to_vector(counts, "counts", -1);
  const auto n = static_cast<int64_t>(count.size());
  const std::vector<int64_t> offset = to_vector(offset_bytes, "offset_bytes", n);
  const std::vector<int64_t> size = to_vector(size_bytes, "size_bytes", n);
  const uint32_t* term = whole_numbers(terms, "terms", terms.numel());
  const uint32_t* value = whole_numbers(values, "values", terms.numel());
  int64_t at = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t needs = static_cast<int64_t>(sizeof(ForwardHeader)) + count[i] * row_bytes(rules);
    at += count[i];
    if (count[i] < 0 || size[i] < needs || offset[i] < 0 || offset[i] > total - size[i])
      invalid("a record has no room");
  }
  if (at != terms.numel()) invalid("terms must be those of all records");
  std::vector<uint8_t> bytes(total);
  {
    py::gil_scoped_release unlocked;
    for (int64_t i = 0; i < n; ++i) {
      write_forward(rules, static_cast<uint32_t>(first + i), term, value, count[i], bytes.data() + offset[i], size[i]);
      term += count[i], value += count[i];
    }
  }
  return NewTensor::of(std::move(bytes), Dtype::uint8);
}

// (scores float32 [n], the first record that is not what it must be or -1, and what is wrong with it). `weights`: the
// bits of float64.
py::tuple score_forward_records(const Tensor& buffer, const Tensor& position_bytes, const Tensor& size_bytes,
                                const Tensor& records, int64_t salt, int64_t kind, int64_t term_bytes,
                                const Tensor& terms, const Tensor& weights) {
  const ForwardRules rules = forward_rules(salt, kind, term_bytes);
  const std::vector<int64_t> record = to_vector(records, "records", -1);
  const auto n = static_cast<int64_t>(record.size());
  const std::vector<int64_t> position = to_vector(position_bytes, "position_bytes", n);
  const std::vector<int64_t> size = to_vector(size_bytes, "size_bytes", n);
  const uint8_t* data = bytes_of(buffer, "buffer");
  for (int64_t i = 0; i < n; ++i) {
    if (position[i] < 0 || size[i] < 0 || position[i] > buffer.numel() - size[i])
      invalid("a record is not in the buffer");
  }
  std::vector<double> weight;
  for (const int64_t bits : to_vector(weights, "weights", terms.numel())) weight.push_back(as_double(bits));
  ForwardQuery query(whole_numbers(terms, "terms", terms.numel()), weight.data(), terms.numel());
  NewFloats scores({n});
  int64_t bad = -1;
  const char* why = "";
  {
    py::gil_scoped_release unlocked;
    for (int64_t i = 0; i < n && bad < 0; ++i) {
      const Bytes bytes{data + position[i], size[i]};
      if (!query.score(rules, static_cast<uint32_t>(record[i]), bytes, scores.data() + i, &why)) bad = i;
    }
  }
  return py::make_tuple(scores.tensor(), bad, why);
}

// (numbers int64 [Q, k], -1 where there are fewer; scores float32 [Q, k]; costs int64 [Q, 3]: requests, bytes asked,
// bytes moved; places in `lists` of lists of other terms)
py::tuple to_results(const std::vector<QueryResult>& results, int64_t k) {
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
    for (const int64_t each : {result.costs.requests, result.costs.bytes_asked, result.costs.bytes_moved}) {
      costs->push_back(each);
    }
    others.insert(others.end(), result.other_terms.begin(), result.other_terms.end());
  }
  return py::make_tuple(NewTensor(numbers->data(), Dtype::int64, {n, k}, numbers), scores.tensor(),
                        NewTensor(costs->data(), Dtype::int64, {n, 3}, costs), to_tensor(std::move(others)));
}

// Checked lists of one query, wherever they lie in `buffer`: (numbers int64 [k], -1 where there are fewer; scores
// float32 [k]). `weights`, `absent`, `norms`: the bits of float64. A damaged list is an IndexError that names it.
py::tuple scan_postings(const Tensor& buffer, const Tensor& offset_bytes, const Tensor& size_bytes,
                        const Tensor& first_layer_bytes, const Tensor& terms, const Tensor& weights,
                        const Tensor& absent, int64_t salt, int64_t kind, int64_t n_records, int64_t k,
                        const std::optional<Tensor>& lengths, const std::optional<Tensor>& norms, int variant,
                        double k1, double delta, double constant, const std::optional<Tensor>& allowed) {
  const std::vector<int64_t> offset = to_vector(offset_bytes, "offset_bytes", -1);
  const auto n = static_cast<int64_t>(offset.size());
  const std::vector<int64_t> size = to_vector(size_bytes, "size_bytes", n);
  const std::vector<int64_t> first_layer = to_vector(first_layer_bytes, "first_layer_bytes", n);
  const std::vector<int64_t> term = to_vector(terms, "terms", n);
  const std::vector<int64_t> weight = to_vector(weights, "weights", n), less = to_vector(absent, "absent", n);
  const uint8_t* data = bytes_of(buffer, "buffer");
  if (n_records < 0 || n_records > kMaxRecords || k < 1) invalid("n_records or k is out of range");
  if (variant < 0 || variant >= kVariants) invalid("unknown variant of BM25");
  SegmentView segment;
  segment.rules = {static_cast<uint32_t>(salt), to_kind(kind), n_records};
  Bm25 rule{static_cast<Variant>(variant), k1, delta, nullptr, nullptr};
  if (segment.rules.kind == ValueKind::kCount) {
    if (!lengths || !norms || lengths->numel() != n_records) invalid("counts need lengths and norms");
    rule.lengths = contiguous<const uint16_t>(*lengths, Dtype::uint16, "lengths", "uint16");
    rule.norms = reinterpret_cast<const double*>(contiguous<const int64_t>(*norms, Dtype::int64, "norms", "int64"));
    // A table of every code needs no look at the codes, which takes as long as the scan of a short query.
    for (int64_t i = 0; norms->numel() <= UINT16_MAX && i < n_records; ++i) {
      if (rule.lengths[i] >= norms->numel()) invalid("lengths have codes beyond norms");
    }
    segment.bm25 = &rule;
  }
  if (allowed) {
    segment.allowed = bytes_of(*allowed, "allowed");
    if (allowed->numel() * 8 < n_records) invalid("allowed must have a bit for every record");
  }
  std::vector<WeightedList> lists;
  std::string bad;
  TopK best(k);
  {
    py::gil_scoped_release unlocked;
    for (int64_t i = 0; i < n && bad.empty(); ++i) {
      const bool is_inside = offset[i] >= 0 && size[i] > 0 && offset[i] <= buffer.numel() - size[i];
      const StoredList list{static_cast<uint32_t>(term[i]), {data + offset[i], size[i]}, first_layer[i], {}, false};
      const char* why = "it does not lie in the buffer";
      if (!is_inside || check_list(list, segment.rules, false, &why) != ListFault::kNone) {
        bad = "list " + std::to_string(i) + ": " + why;
      }
      lists.push_back({list, as_double(weight[i]), as_double(less[i])});
    }
    size_t out_of_order = 0;
    if (bad.empty() && !Scanner().scan(segment, lists, static_cast<float>(constant), best, &out_of_order)) {
      bad = "list " + std::to_string(out_of_order) + ": its record numbers are out of order";
    }
  }
  if (!bad.empty()) throw py::index_error(bad);
  QueryResult result;
  result.hits = best.take();
  const py::tuple found = to_results({result}, k);
  return py::make_tuple(found[0], found[1]);
}

// A request, and what its pointers lead into.
struct PyRequest {
  SearchRequest request;
  Bm25 rule{};
  std::vector<Bm25> rules;  // of each segment
  std::vector<uint8_t> names;
  std::vector<std::shared_ptr<void>> keeps;

  explicit PyRequest(const py::dict& query) {
    set_rule(query);
    const auto segments = query["segments"].cast<std::vector<py::dict>>();
    rules.reserve(segments.size());
    for (const py::dict& segment : segments) add_segment(segment);
    add_lists(query);
    const auto constants = query["constants"].cast<Tensor>();
    const auto* constant = contiguous<const float>(constants, Dtype::float32, "constants", "float32");
    request.constants.assign(constant, constant + constants.numel());
    request.first_list = to_vector(query["first_list"].cast<Tensor>(), "first_list", constants.numel() + 1);
    const auto n_lists = static_cast<int64_t>(request.lists.size());
    for (size_t i = 0; i < request.first_list.size(); ++i) {
      const int64_t from = i == 0 ? 0 : request.first_list[i - 1];
      if (request.first_list[i] < from || request.first_list[i] > n_lists) invalid("first_list is out of order");
    }
    if (request.first_list[0] != 0 || request.first_list.back() != n_lists) invalid("first_list must have all lists");
    request.k = query["k"].cast<int64_t>();
    request.threads = query["threads"].cast<int>();
    request.deadline_s = query["deadline_s"].cast<double>();
    if (request.k < 1 || request.threads < 1 || !(request.deadline_s > 0)) invalid("k, threads and deadline_s");
  }

 private:
  void set_rule(const py::dict& query) {
    const int variant = query["variant"].cast<int>();
    if (variant < 0 || variant >= kVariants) invalid("unknown variant of BM25");
    rule.variant = static_cast<Variant>(variant);
    rule.k1 = query["k1"].cast<double>(), rule.delta = query["delta"].cast<double>();
  }

  void add_segment(const py::dict& given) {
    OpenSegment segment;
    ListRules& list = segment.view.rules;
    list.salt = given["salt"].cast<uint32_t>();
    list.kind = to_kind(given["kind"].cast<int64_t>());
    list.n_records = given["n_records"].cast<int64_t>();
    if (list.n_records < 0 || list.n_records > kMaxRecords) invalid("a segment has too many records");
    segment.view.first_number = given["first_number"].cast<int64_t>();
    segment.file = given["file"].cast<int64_t>();
    segment.begin_bytes = given["begin_bytes"].cast<int64_t>();
    segment.size_bytes = given["size_bytes"].cast<int64_t>();
    segment.name = given["name"].cast<std::string>();
    if (list.kind == ValueKind::kCount) add_lengths(given, segment);
    if (!given["allowed"].is_none()) {
      const auto allowed = given["allowed"].cast<Tensor>();
      segment.view.allowed = bytes_of(allowed, "allowed");
      if (allowed.numel() * 8 < list.n_records) invalid("allowed must have a bit for every record");
      keeps.push_back(allowed.keep());
    }
    request.segments.push_back(std::move(segment));
  }

  void add_lengths(const py::dict& given, OpenSegment& segment) {
    const auto lengths = given["lengths"].cast<Tensor>();
    rule.lengths = contiguous<const uint16_t>(lengths, Dtype::uint16, "lengths", "uint16");
    if (lengths.numel() != segment.view.rules.n_records) invalid("lengths must have one entry a record");
    keeps.push_back(lengths.keep());
    // One for each code that `lengths` have, which was looked at when the segment was opened.
    const auto norms = given["norms"].cast<Tensor>();
    rule.norms = reinterpret_cast<const double*>(contiguous<const int64_t>(norms, Dtype::int64, "norms", "int64"));
    keeps.push_back(norms.keep());
    rules.push_back(rule);
    segment.view.bm25 = &rules.back();
  }

  // Columns of `lists`: segment, term, offset_bytes, size_bytes, first_layer_bytes, is_prefix, is_digest, the bits of
  // weight and absent, and which of the names is the term's.
  void add_lists(const py::dict& query) {
    constexpr int64_t kColumns = 10;
    const auto table = query["lists"].cast<Tensor>();
    const auto* row = contiguous<const int64_t>(table, Dtype::int64, "lists", "int64 [n, 10]");
    if (table.dim() != 2 || table.size(1) != kColumns) invalid("lists must be [n, 10]");
    const int64_t n = table.size(0);
    const auto given = query["names"].cast<Tensor>();
    names.assign(bytes_of(given, "names"), bytes_of(given, "names") + given.numel());
    const auto begin = query["name_begin"].cast<Tensor>();
    const int64_t n_names = begin.numel() - 1;
    const Names name(given, begin, n_names);
    for (int64_t i = 0; i < n; ++i, row += kColumns) {
      if (row[0] < 0 || row[0] >= static_cast<int64_t>(request.segments.size())) invalid("a list is of no segment");
      const OpenSegment& segment = request.segments[row[0]];
      const bool is_inside = row[2] >= 0 && row[3] > 0 && row[3] <= segment.size_bytes &&
                             row[2] <= segment.size_bytes - row[3] && row[4] >= 0;
      if (!is_inside || row[9] < 0 || row[9] >= n_names) invalid("a list does not lie in its segment");
      const Bytes own = name.of(row[9]);
      request.lists.push_back({static_cast<int32_t>(row[0]),
                               static_cast<uint32_t>(row[1]),
                               row[2],
                               row[3],
                               row[4],
                               row[5] != 0,
                               as_double(row[7]),
                               as_double(row[8]),
                               {names.data() + (own.data - name.data), own.size},
                               row[6] != 0});
    }
  }
};

const std::function<bool()> kInterrupted = [] {
  py::gil_scoped_acquire locked;
  return PyErr_CheckSignals() != 0;
};

// Rethrows what a signal handler raised in place of the failure that its interruption became.
template <typename Work>
auto interruptible(const Work& work) {
  try {
    py::gil_scoped_release unlocked;
    return work();
  } catch (const io::FailureError&) {
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    throw;
  }
}

py::tuple search_postings(const std::shared_ptr<io::Engine>& engine, const py::dict& query) {
  if (!engine->in_own_process()) invalid("the postings belong to the parent process; open them after fork()");
  free_kept();
  const PyRequest given(query);
  const auto results = interruptible([&] { return search(*engine, given.request, kInterrupted); });
  return to_results(results, given.request.k);
}

struct PyTicket {
  PyTicket(const std::shared_ptr<io::Engine>& engine, const py::dict& query)
      : given(std::make_unique<PyRequest>(query)) {
    if (!engine->in_own_process()) invalid("the postings belong to the parent process; open them after fork()");
    if (given->request.constants.size() != 1) invalid("a ticket is of one query");
    py::gil_scoped_release unlocked;
    ticket = std::make_unique<Ticket>(engine, given->request);
  }
  ~PyTicket() {
    if (!ticket->in_own_process()) {  // a thread of the parent may be waiting in it: see Engine::forget
      static_cast<void>(ticket.release());
      static_cast<void>(given.release());
      return;
    }
    py::gil_scoped_release unlocked;
    ticket.reset();
  }

  // The result by the first `lists` lists, as search_postings returns it.
  py::tuple result(int64_t lists) {
    if (!ticket->in_own_process()) invalid("the search belongs to the parent process; begin it after fork()");
    if (lists < 0 || lists > ticket->lists()) invalid("the query has fewer lists");
    const auto found = interruptible([&] { return ticket->result(lists, kInterrupted); });
    return to_results({found}, given->request.k);
  }

  void cancel() {
    if (ticket->in_own_process()) ticket->cancel();
  }

  std::unique_ptr<PyRequest> given;
  std::unique_ptr<Ticket> ticket;
};

}  // namespace

void bind_postings(py::module_& m) {
  py::class_<PyListEncoder>(m, "ListEncoder")
      .def(py::init<uint32_t, int64_t>(), py::arg("salt"), py::arg("kind"))
      .def("begin_list", &PyListEncoder::begin_list)
      .def("add", &PyListEncoder::add)
      .def("end_layer", &PyListEncoder::end_layer)
      .def("add_lists", &PyListEncoder::add_lists)
      .def("take", &PyListEncoder::take);
  m.def("decode_list", &decode_list);
  m.def("search_postings", &search_postings);
  m.def("read_lists", &read_lists);
  m.def("scan_postings", &scan_postings);
  m.def("write_forward", &write_forward_records);
  m.def("score_forward", &score_forward_records);
  py::class_<PyTicket>(m, "PostingsTicket")
      .def(py::init<const std::shared_ptr<io::Engine>&, const py::dict&>())
      .def("result", &PyTicket::result)
      .def("cancel", &PyTicket::cancel, py::call_guard<py::gil_scoped_release>());
}

}  // namespace espnx::python
