// Posting lists in Python: writing lists, reading them back, scanning those in memory.
#include "postings.hpp"

#include <cstdint>
#include <optional>

#include "cpu/postings/forward.hpp"

namespace espnx::python {
namespace {

class PyListEncoder {
 public:
  PyListEncoder(uint32_t salt, int64_t kind) : encoder_(salt, to_kind(kind)) {}

  void begin_list(int64_t term, const Tensor& name, bool is_digest) {
    if (name.numel() > kMaxTermBytes) invalid("a name must be at most 256 bytes");
    encoder_.begin_list(static_cast<uint32_t>(term), {bytes_of(name, "name"), name.numel()},
                        is_digest);
  }

  void add(const Tensor& records, const Tensor& values) {
    const int64_t n = records.numel();
    const uint32_t* record = whole_numbers(records, "records", n);
    const uint32_t* value = whole_numbers(values, "values", n);
    py::gil_scoped_release unlocked;
    encoder_.add(record, value, n);
  }

  int64_t end_layer(bool is_last) { return encoder_.end_layer(is_last); }

  // Whole lists, of terms first_term, first_term + 1, ...: `counts` postings each, of which the
  // first `first_counts` are a layer of their own (0: there is one layer). (bytes of each list,
  // bytes of its first layer or 0.)
  std::pair<NewTensor, NewTensor> add_lists(int64_t first_term, const Tensor& names,
                                            const Tensor& name_begin, const Tensor& digests,
                                            const Tensor& counts, const Tensor& first_counts,
                                            const Tensor& records, const Tensor& values) {
    const std::vector<int64_t> count = to_vector(counts, "counts", -1);
    const auto n_terms = static_cast<int64_t>(count.size());
    const std::vector<int64_t> first = to_vector(first_counts, "first_counts", n_terms);
    const Names name(names, name_begin, n_terms);
    const uint8_t* is_digest = bytes_of(digests, "digests");
    if (digests.numel() != n_terms) invalid("digests must have one entry a term");
    int64_t total = 0;
    for (int64_t i = 0; i < n_terms; ++i) {
      if (count[i] < 1 || first[i] < 0 || first[i] >= count[i])
        invalid("a list must have postings in each layer");
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

// (records uint32 [n], values uint32 [n], postings of the first of two layers); a text that says
// what is wrong; or None for a list of another term.
py::object decode_list(const Tensor& list, int64_t salt, int64_t kind, int64_t n_records,
                       int64_t term, const Tensor& name, bool is_digest,
                       int64_t first_layer_bytes) {
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

// Whole lists of terms first_term, first_term + 1, ..., each where it lies in `buffer`, of which a
// dictionary says that they have `df` postings: (counts int64 [n], records uint32, values uint32,
// the first list that is damaged or -1, what is wrong with it). With `kept`, bit i % 8 of byte i /
// 8: postings of records that it says.
py::tuple read_lists(const Tensor& buffer, const Tensor& offset_bytes, const Tensor& size_bytes,
                     const Tensor& first_layer_bytes, const Tensor& names, const Tensor& name_begin,
                     const Tensor& digests, int64_t first_term, int64_t salt, int64_t kind,
                     int64_t n_records, const Tensor& df, const std::optional<Tensor>& kept) {
  const std::vector<int64_t> offset = to_vector(offset_bytes, "offset_bytes", -1);
  const auto n = static_cast<int64_t>(offset.size());
  const std::vector<int64_t> size = to_vector(size_bytes, "size_bytes", n);
  const std::vector<int64_t> first_layer = to_vector(first_layer_bytes, "first_layer_bytes", n);
  const std::vector<int64_t> expected = to_vector(df, "df", n);
  const Names name(names, name_begin, n);
  const uint8_t* is_digest = bytes_of(digests, "digests");
  const uint8_t* data = bytes_of(buffer, "buffer");
  const uint8_t* keep = kept ? bytes_of(*kept, "kept") : nullptr;
  if (digests.numel() != n || (kept && kept->numel() * 8 < n_records))
    invalid("digests and kept must cover all");
  for (int64_t i = 0; i < n; ++i) {
    if (offset[i] < 0 || size[i] < 0 || offset[i] > buffer.numel() - size[i])
      invalid("a list is not in the buffer");
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
      if (bad < 0 && static_cast<int64_t>(list.records.size()) != expected[i])
        bad = i, why = "postings are missing";
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
  return py::make_tuple(to_tensor(std::move(counts)),
                        NewTensor::of(std::move(records), Dtype::uint32),
                        NewTensor::of(std::move(values), Dtype::uint32), bad, why);
}

ForwardRules forward_rules(int64_t salt, int64_t kind, int64_t term_bytes) {
  const ForwardRules rules{static_cast<uint32_t>(salt), to_kind(kind),
                           static_cast<int>(term_bytes)};
  if (rules.kind == ValueKind::kCount || (term_bytes != 2 && term_bytes != 4))
    invalid("no such forward records");
  return rules;
}

// uint8 [total]: forward records of `first`, first + 1, ..., each at its offset.
NewTensor write_forward_records(int64_t salt, int64_t kind, int64_t term_bytes, int64_t first,
                                const Tensor& counts, const Tensor& terms, const Tensor& values,
                                const Tensor& offset_bytes, const Tensor& size_bytes,
                                int64_t total) {
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
      write_forward(rules, static_cast<uint32_t>(first + i), term, value, count[i],
                    bytes.data() + offset[i], size[i]);
      term += count[i], value += count[i];
    }
  }
  return NewTensor::of(std::move(bytes), Dtype::uint8);
}

// (scores float32 [n], the first record that is not what it must be or -1, and what is wrong with
// it). `weights`: the bits of float64.
py::tuple score_forward_records(const Tensor& buffer, const Tensor& position_bytes,
                                const Tensor& size_bytes, const Tensor& records, int64_t salt,
                                int64_t kind, int64_t term_bytes, const Tensor& terms,
                                const Tensor& weights) {
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
  for (const int64_t bits : to_vector(weights, "weights", terms.numel()))
    weight.push_back(as_double(bits));
  ForwardQuery query(whole_numbers(terms, "terms", terms.numel()), weight.data(), terms.numel());
  NewFloats scores({n});
  int64_t bad = -1;
  const char* why = "";
  {
    py::gil_scoped_release unlocked;
    for (int64_t i = 0; i < n && bad < 0; ++i) {
      const Bytes bytes{data + position[i], size[i]};
      if (!query.score(rules, static_cast<uint32_t>(record[i]), bytes, scores.data() + i, &why))
        bad = i;
    }
  }
  return py::make_tuple(scores.tensor(), bad, why);
}

// Checked lists of one query, wherever they lie in `buffer`: (numbers int64 [k], -1 where there are
// fewer; scores float32 [k]). `weights`, `absent`, `norms`: the bits of float64. A damaged list is
// an IndexError that names it.
py::tuple scan_postings(const Tensor& buffer, const Tensor& offset_bytes, const Tensor& size_bytes,
                        const Tensor& first_layer_bytes, const Tensor& terms, const Tensor& weights,
                        const Tensor& absent, int64_t salt, int64_t kind, int64_t n_records,
                        int64_t k, const std::optional<Tensor>& lengths,
                        const std::optional<Tensor>& norms, int variant, double k1, double delta,
                        double constant, const std::optional<Tensor>& allowed) {
  const std::vector<int64_t> offset = to_vector(offset_bytes, "offset_bytes", -1);
  const auto n = static_cast<int64_t>(offset.size());
  const std::vector<int64_t> size = to_vector(size_bytes, "size_bytes", n);
  const std::vector<int64_t> first_layer = to_vector(first_layer_bytes, "first_layer_bytes", n);
  const std::vector<int64_t> term = to_vector(terms, "terms", n);
  const std::vector<int64_t> weight = to_vector(weights, "weights", n),
                             less = to_vector(absent, "absent", n);
  const uint8_t* data = bytes_of(buffer, "buffer");
  if (n_records < 0 || n_records > kMaxRecords || k < 1) invalid("n_records or k is out of range");
  if (variant < 0 || variant >= kVariants) invalid("unknown variant of BM25");
  SegmentView segment;
  segment.rules = {static_cast<uint32_t>(salt), to_kind(kind), n_records};
  Bm25 rule{static_cast<Variant>(variant), k1, delta, nullptr, nullptr};
  if (segment.rules.kind == ValueKind::kCount) {
    if (!lengths || !norms || lengths->numel() != n_records)
      invalid("counts need lengths and norms");
    rule.lengths = contiguous<const uint16_t>(*lengths, Dtype::uint16, "lengths", "uint16");
    rule.norms = reinterpret_cast<const double*>(
        contiguous<const int64_t>(*norms, Dtype::int64, "norms", "int64"));
    // A table of every code needs no look at the codes, which takes as long as the scan of a short
    // query.
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
      const StoredList list{
          static_cast<uint32_t>(term[i]), {data + offset[i], size[i]}, first_layer[i], {}, false};
      const char* why = "it does not lie in the buffer";
      if (!is_inside || check_list(list, segment.rules, false, &why) != ListFault::kNone) {
        bad = "list " + std::to_string(i) + ": " + why;
      }
      lists.push_back({list, as_double(weight[i]), as_double(less[i])});
    }
    size_t out_of_order = 0;
    if (bad.empty() &&
        !Scanner().scan(segment, lists, static_cast<float>(constant), best, &out_of_order)) {
      bad = "list " + std::to_string(out_of_order) + ": its record numbers are out of order";
    }
  }
  if (!bad.empty()) throw py::index_error(bad);
  QueryResult result;
  result.hits = best.take();
  const py::tuple found = to_results({result}, k);
  return py::make_tuple(found[0], found[1]);
}

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
  m.def("read_lists", &read_lists);
  m.def("scan_postings", &scan_postings);
  m.def("write_forward", &write_forward_records);
  m.def("score_forward", &score_forward_records);
  bind_postings_search(m);
}

}  // namespace espnx::python
