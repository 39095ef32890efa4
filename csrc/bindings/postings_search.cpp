// Searching posting lists in Python: planning what a batch of queries wants, searches, tickets.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

#include "postings.hpp"
#include "postings/plan.hpp"

namespace espnx::python {
namespace {

// Dictionaries of the segments of a collection. Arrays come as buffers, which may be read-only.
class PyDictionaries {
 public:
  void add(const py::buffer& hashes, const py::buffer& first, const py::buffer& df,
           const std::optional<py::buffer>& first_layer, const std::optional<py::buffer>& exponents,
           const py::buffer& removed, const py::buffer& removed_df, int64_t kind) {
    Dictionary held;
    held.kind = to_kind(kind);
    held.hashes = array<uint64_t>(hashes, -1, "hashes");
    held.n_terms = static_cast<int64_t>(keeps_.back().size);
    held.first = array<uint32_t>(first, held.n_terms + 1, "first");
    held.df = array<uint32_t>(df, held.n_terms, "df");
    if (first_layer) held.first_layer = array<uint16_t>(*first_layer, held.n_terms, "first_layer");
    if (exponents) held.exponents = array<int8_t>(*exponents, held.n_terms, "exponents");
    held.removed = array<int64_t>(removed, -1, "removed");
    held.n_removed = static_cast<int64_t>(keeps_.back().size);
    held.removed_df = array<int64_t>(removed_df, held.n_removed, "removed_df");
    held_.push_back(held);
  }

  // Of each hash (the bits of uint64) in each segment: the first term that has it, -1 for none
  // (int64 [segments, n]); and (segment, hash, terms) where several have it.
  py::tuple look_up(const Tensor& hashes) const {
    const std::vector<int64_t> wanted = to_vector(hashes, "hashes", -1);
    const auto n = static_cast<int64_t>(wanted.size());
    auto numbers = std::make_shared<std::vector<int64_t>>(held_.size() * wanted.size());
    py::list shared;
    for (size_t i = 0; i < held_.size(); ++i) {
      for (int64_t j = 0; j < n; ++j) {
        const auto [first, count] = held_[i].find(static_cast<uint64_t>(wanted[j]));
        (*numbers)[i * n + j] = count > 0 ? first : -1;
        if (count > 1) shared.append(py::make_tuple(i, j, count));
      }
    }
    const std::vector<int64_t> shape = {static_cast<int64_t>(held_.size()), n};
    return py::make_tuple(NewTensor(numbers->data(), Dtype::int64, shape, numbers), shared);
  }

  // See plan_lists: (the bits of weights int64 [n], absent float32 [n], lists int64 [lists, 12]).
  // Strikes terms from `numbers`. `token_weights`: the bits of float64.
  py::tuple plan(const Tensor& numbers, const Tensor& tokens, const Tensor& token_weights,
                 const Tensor& first_token, int variant, int64_t n_records,
                 double absent_part) const {
    if (variant < 0 || variant >= kVariants) invalid("unknown variant of BM25");
    auto* number = contiguous<int64_t>(numbers, Dtype::int64, "numbers", "int64");
    const auto n_segments = static_cast<int64_t>(held_.size());
    if (numbers.dim() != 2 || numbers.size(0) != n_segments)
      invalid("numbers must have a row for each segment");
    const std::vector<int64_t> token = to_vector(tokens, "tokens", -1);
    const auto n_tokens = static_cast<int64_t>(token.size());
    const std::vector<int64_t> first = to_vector(first_token, "first_token", -1);
    std::vector<double> weight;
    for (const int64_t bits : to_vector(token_weights, "token_weights", n_tokens))
      weight.push_back(as_double(bits));
    BatchTerms batch{numbers.size(1), static_cast<int64_t>(first.size()) - 1, token.data(),
                     weight.data(), first.data()};
    check(batch, number, n_tokens);
    PlannedLists found =
        plan_lists(held_, {static_cast<Variant>(variant), n_records, absent_part}, batch, number);
    std::vector<int64_t> bits(found.weights.size());
    if (!bits.empty()) std::memcpy(bits.data(), found.weights.data(), bits.size() * sizeof(double));
    auto rows = std::make_shared<std::vector<int64_t>>(std::move(found.rows));
    const std::vector<int64_t> shape = {static_cast<int64_t>(rows->size()) / kListColumns,
                                        kListColumns};
    return py::make_tuple(to_tensor(std::move(bits)), to_tensor(std::move(found.absent)),
                          NewTensor(rows->data(), Dtype::int64, shape, rows));
  }

 private:
  template <typename T>
  const T* array(const py::buffer& given, int64_t count, const char* name) {
    py::buffer_info info = given.request();
    const bool is_dense = info.ndim == 1 && info.itemsize == sizeof(T) &&
                          (info.size < 2 || info.strides[0] == sizeof(T));
    if (!is_dense || reinterpret_cast<uintptr_t>(info.ptr) % alignof(T) != 0 ||
        (count >= 0 && info.size != count)) {
      invalid(std::string(name) + " of a dictionary must be a dense array of the right size");
    }
    keeps_.push_back(std::move(info));
    return static_cast<const T*>(keeps_.back().ptr);
  }

  void check(const BatchTerms& batch, const int64_t* numbers, int64_t n_tokens) const {
    if (batch.n_queries < 0 || batch.first_token[0] != 0 ||
        batch.first_token[batch.n_queries] != n_tokens) {
      invalid("first_token must have all tokens");
    }
    for (int64_t i = 0; i < batch.n_queries; ++i) {
      if (batch.first_token[i] > batch.first_token[i + 1]) invalid("first_token is out of order");
    }
    for (int64_t i = 0; i < n_tokens; ++i) {
      if (batch.tokens[i] < 0 || batch.tokens[i] >= batch.n_terms)
        invalid("a token is no term of the batch");
    }
    for (size_t i = 0; i < held_.size(); ++i) {
      for (int64_t j = 0; j < batch.n_terms; ++j) {
        if (numbers[i * batch.n_terms + j] >= held_[i].n_terms)
          invalid("a segment has fewer terms");
      }
    }
  }

  std::vector<Dictionary> held_;
  std::vector<py::buffer_info> keeps_;
};

// A request, and what its pointers lead into.
struct PyRequest {
  SearchRequest request;
  Bm25 rule{};
  std::vector<Bm25> rules;  // of each segment
  std::vector<std::string> names;
  std::vector<std::shared_ptr<void>> keeps;

  explicit PyRequest(const py::dict& query) {
    set_rule(query);
    const auto segments = query["segments"].cast<std::vector<py::dict>>();
    rules.reserve(segments.size());
    for (const py::dict& segment : segments) add_segment(segment);
    const auto constants = query["constants"].cast<Tensor>();
    const auto* constant =
        contiguous<const float>(constants, Dtype::float32, "constants", "float32");
    request.constants.assign(constant, constant + constants.numel());
    add_lists(query);
    request.k = query["k"].cast<int64_t>();
    request.threads = query["threads"].cast<int>();
    request.deadline_s = query["deadline_s"].cast<double>();
    if (request.k < 1 || request.threads < 1 || !(request.deadline_s > 0))
      invalid("k, threads and deadline_s");
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
    if (list.n_records < 0 || list.n_records > kMaxRecords)
      invalid("a segment has too many records");
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
    if (lengths.numel() != segment.view.rules.n_records)
      invalid("lengths must have one entry a record");
    keeps.push_back(lengths.keep());
    // One for each code that `lengths` have, which was looked at when the segment was opened.
    const auto norms = given["norms"].cast<Tensor>();
    rule.norms = reinterpret_cast<const double*>(
        contiguous<const int64_t>(norms, Dtype::int64, "norms", "int64"));
    keeps.push_back(norms.keep());
    rules.push_back(rule);
    segment.view.bm25 = &rules.back();
  }

  // Columns of `lists`: see PlannedLists; the bits that are 0 there say which layers are read, and
  // whose name is a digest.
  void add_lists(const py::dict& query) {
    const auto table = query["lists"].cast<Tensor>();
    const auto* row = contiguous<const int64_t>(table, Dtype::int64, "lists", "int64 [n, 12]");
    if (table.dim() != 2 || table.size(1) != kListColumns) invalid("lists must be [n, 12]");
    names = query["names"].cast<std::vector<std::string>>();
    for (const std::string& name : names) {
      if (name.size() > kMaxTermBytes) invalid("names must be at most 256 bytes each");
    }
    const auto n_names = static_cast<int64_t>(names.size()),
               n_queries = static_cast<int64_t>(request.constants.size());
    for (int64_t n = table.size(0); n > 0; --n, row += kListColumns) {
      if (row[0] < 0 || row[0] >= static_cast<int64_t>(request.segments.size()))
        invalid("a list is of no segment");
      const OpenSegment& segment = request.segments[row[0]];
      const bool is_inside = row[2] >= 0 && row[3] > 0 && row[3] <= segment.size_bytes &&
                             row[2] <= segment.size_bytes - row[3] && row[4] >= 0;
      if (!is_inside || row[9] < 0 || row[9] >= n_names)
        invalid("a list does not lie in its segment");
      const auto latest = std::max<int64_t>(0, static_cast<int64_t>(request.first_list.size()) - 1);
      if (row[10] < latest || row[10] >= n_queries)
        invalid("lists are not in the order of their queries");
      request.first_list.resize(row[10] + 1, static_cast<int64_t>(request.lists.size()));
      const std::string& name = names[row[9]];
      request.lists.push_back(
          {static_cast<int32_t>(row[0]),
           static_cast<uint32_t>(row[1]),
           row[2],
           row[3],
           row[4],
           row[5] != 0,
           as_double(row[7]),
           as_double(row[8]),
           {reinterpret_cast<const uint8_t*>(name.data()), static_cast<int64_t>(name.size())},
           row[6] != 0});
    }
    request.first_list.resize(n_queries + 1, static_cast<int64_t>(request.lists.size()));
  }
};

py::tuple search_postings(const std::shared_ptr<io::Engine>& engine, const py::dict& query) {
  if (!engine->in_own_process())
    invalid("the postings belong to the parent process; open them after fork()");
  free_kept();
  const PyRequest given(query);
  const auto results = run_interruptibly([&](const std::function<bool()>& interrupted) {
    return search(*engine, given.request, interrupted);
  });
  return to_results(results, given.request.k);
}

struct PyTicket {
  PyTicket(const std::shared_ptr<io::Engine>& engine, const py::dict& query)
      : given(std::make_unique<PyRequest>(query)) {
    if (!engine->in_own_process())
      invalid("the postings belong to the parent process; open them after fork()");
    if (given->request.constants.size() != 1) invalid("a ticket is of one query");
    py::gil_scoped_release unlocked;
    ticket = std::make_unique<Ticket>(engine, given->request);
  }
  ~PyTicket() {
    if (!ticket->in_own_process()) {  // a thread of the parent may be waiting in it: see
                                      // Engine::forget
      static_cast<void>(ticket.release());
      static_cast<void>(given.release());
      return;
    }
    py::gil_scoped_release unlocked;
    ticket.reset();
  }

  // The result by the first `lists` lists, as search_postings returns it.
  py::tuple result(int64_t lists) {
    if (!ticket->in_own_process())
      invalid("the search belongs to the parent process; begin it after fork()");
    if (lists < 0 || lists > ticket->lists()) invalid("the query has fewer lists");
    const auto found = run_interruptibly([&](const std::function<bool()>& interrupted) {
      return ticket->result(lists, interrupted);
    });
    return to_results({found}, given->request.k);
  }

  void cancel() {
    if (ticket->in_own_process()) ticket->cancel();
  }

  std::unique_ptr<PyRequest> given;
  std::unique_ptr<Ticket> ticket;
};

}  // namespace

void bind_postings_search(py::module_& m) {
  py::class_<PyDictionaries>(m, "PostingsDictionaries")
      .def(py::init<>())
      .def("add", &PyDictionaries::add)
      .def("look_up", &PyDictionaries::look_up)
      .def("plan", &PyDictionaries::plan);
  m.def("search_postings", &search_postings);
  py::class_<PyTicket>(m, "PostingsTicket")
      .def(py::init<const std::shared_ptr<io::Engine>&, const py::dict&>())
      .def("result", &PyTicket::result)
      .def("cancel", &PyTicket::cancel, py::call_guard<py::gil_scoped_release>());
}

}  // namespace espnx::python
