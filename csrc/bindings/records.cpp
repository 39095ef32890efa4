// Records in Python: where they lie, and streams that read and score them as they arrive.
#include "device/records.hpp"

#include <optional>
#include <tuple>

#include "bindings.hpp"
#include "device/record_stream.hpp"
#include "streams.hpp"

namespace espnx::python {
namespace {

const uint16_t* token_counts(const Tensor& n_tokens) {
  return contiguous<const uint16_t>(n_tokens, Dtype::uint16, "n_tokens", "uint16");
}

void check_records(const std::vector<int64_t>& records, int64_t total) {
  for (const int64_t record : records) {
    if (record < 0 || record >= total)
      invalid("record " + std::to_string(record) + " is not in the store");
  }
}

const int64_t* group_offsets(const Tensor& group_offset_bytes, int64_t total) {
  const auto* offsets =
      contiguous<const int64_t>(group_offset_bytes, Dtype::int64, "group_offset_bytes", "int64");
  if (group_offset_bytes.numel() * espnx::kGroupRecords < total) {
    invalid("group_offset_bytes must have one entry for every 64 records");
  }
  return offsets;
}

const float* float_values(const Tensor& tensor, const char* name) {
  return contiguous<const float>(tensor, Dtype::float32, name, "float32");
}

espnx::TokenFormat to_format(const std::string& name) {
  espnx::TokenFormat format;
  if (!espnx::parse_token_format(name.c_str(), &format))
    invalid("unknown token format '" + name + "'");
  return format;
}

using Queries = std::vector<std::tuple<Tensor, Tensor, double>>;  // tokens, CLS, weight of CLS

espnx::RecordRules to_rules(const py::dict& rules, const std::optional<Tensor>& centroids,
                            const std::optional<Tensor>& bucket_weights) {
  espnx::RecordRules common{
      rules["salt"].cast<uint32_t>(),
      rules["format_number"].cast<uint8_t>(),
      {rules["fixed_bytes"].cast<int64_t>(), rules["row_bytes"].cast<int64_t>()},
      to_format(rules["format"].cast<std::string>()),
      to_format(rules["cls_format"].cast<std::string>()),
      rules["dim"].cast<int64_t>(),
      rules["d_cls"].cast<int64_t>(),
      {}};
  const int residual_bits = espnx::residual_bits(common.tokens);
  const bool has_codebook = centroids && bucket_weights;
  if (centroids.has_value() != bucket_weights.has_value())
    invalid("centroids and bucket_weights come together");
  if (residual_bits == 0 && has_codebook) invalid("a codebook belongs to residual formats alone");
  if (has_codebook) {
    const bool fits = centroids->dim() == 2 && centroids->size(1) == common.dim;
    if (!fits || bucket_weights->numel() != 1 << residual_bits)
      invalid("the codebook does not fit the records");
    common.codebook = {float_values(*centroids, "centroids"), centroids->size(0),
                       float_values(*bucket_weights, "bucket_weights")};
  }
  return common;
}

std::vector<device::OwnQuery> to_queries(const espnx::RecordRules& common, const Queries& queries) {
  std::vector<device::OwnQuery> wanted;
  for (const auto& [tokens, cls, weight] : queries) {
    if (tokens.dim() != 2 || tokens.size(1) != common.dim || cls.numel() < common.d_cls) {
      invalid("a query does not have the records' dimensions");
    }
    const float *token = float_values(tokens, "tokens"), *value = float_values(cls, "cls");
    wanted.push_back({{token, token + tokens.numel()},
                      {value, value + cls.numel()},
                      tokens.size(0),
                      static_cast<float>(weight)});
  }
  return wanted;
}

// Places among `count` numbers, ordered, and queries among `queries`.
void check_pairs(const std::vector<int64_t>& item, const std::vector<int64_t>& query, int64_t count,
                 size_t queries) {
  for (size_t i = 0; i < item.size(); ++i) {
    const bool is_there = item[i] >= 0 && item[i] < count && query[i] >= 0 &&
                          query[i] < static_cast<int64_t>(queries);
    if (!is_there || (i > 0 && item[i] < item[i - 1])) {
      invalid("pairs must be ordered by item, and name items and queries that are there");
    }
  }
}

using Kept = std::shared_ptr<const device::KeptRecords>;

Kept keep_records(const Tensor& n_tokens, const Tensor& group_offset_bytes,
                  const Tensor& segment_begin, const Tensor& files, const py::dict& rules,
                  const std::optional<Tensor>& centroids,
                  const std::optional<Tensor>& bucket_weights) {
  auto kept = std::make_shared<device::KeptRecords>();
  kept->rules = to_rules(rules, centroids, bucket_weights);
  kept->n_tokens = token_counts(n_tokens);
  kept->total = n_tokens.numel();
  // A store that holds nothing has nothing to train a codebook on.
  const bool is_coded = espnx::residual_bits(kept->rules.tokens) > 0;
  if (is_coded && !centroids && kept->total > 0)
    invalid("records of a residual format need their codebook");
  kept->group_offset_bytes = group_offsets(group_offset_bytes, kept->total);
  kept->segment_begin = to_vector(segment_begin, "segment_begin", -1);
  kept->files = to_vector(files, "files", static_cast<int64_t>(kept->segment_begin.size()));
  for (const Tensor* tensor : {&n_tokens, &group_offset_bytes})
    kept->keeps_alive.push_back(tensor->keep());
  for (const auto* tensor : {&centroids, &bucket_weights}) {
    if (*tensor) kept->keeps_alive.push_back((*tensor)->keep());
  }
  return kept;
}

using PyRecordStream = PyStream<device::RecordStream>;

void check(const device::RecordStream& stream) { check_process(stream, "records"); }

struct PyRecordTicket {
  std::shared_ptr<device::RecordStream> stream;
  device::RecordStream::Ticket ticket;
  int64_t count;
  size_t queries;

  PyRecordTicket(std::shared_ptr<device::RecordStream> stream, device::RecordStream::Ticket ticket,
                 int64_t count, size_t queries)
      : stream(std::move(stream)), ticket(std::move(ticket)), count(count), queries(queries) {}
  PyRecordTicket(PyRecordTicket&&) = default;
  ~PyRecordTicket() {
    if (!ticket) return;
    if (!stream->in_own_process()) {  // a thread of the parent may be waiting in it: see
                                      // Engine::forget
      new device::RecordStream::Ticket(std::move(ticket));
      new std::shared_ptr<device::RecordStream>(std::move(stream));
      return;
    }
    py::gil_scoped_release unlocked;  // the last reference to a stream waits for its threads
    ticket.reset();
    stream.reset();
  }

  std::pair<NewTensor, bool> next(int64_t at_least, double timeout_s) {
    check(*stream);
    return next_items(*stream, *ticket, at_least, timeout_s);
  }

  NewTensor scores() const {
    return to_tensor(std::vector<float>(device::RecordStream::scores(*ticket)));
  }

  NewTensor score_more(const Tensor& pair_item, const Tensor& pair_query) {
    check(*stream);
    const std::vector<int64_t> item = to_vector(pair_item, "pair_item", -1);
    const std::vector<int64_t> query =
        to_vector(pair_query, "pair_query", static_cast<int64_t>(item.size()));
    check_pairs(item, query, count, queries);
    std::vector<float> found;
    {
      py::gil_scoped_release unlocked;
      found = device::RecordStream::score_more(*ticket, item, query);
    }
    return to_tensor(std::move(found));
  }

  // (memory, where each record begins in it): none while the reads wait for the window.
  std::optional<std::pair<NewTensor, NewTensor>> memory() const {
    const auto transfer = device::RecordStream::transfer(*ticket);
    if (!transfer) return std::nullopt;
    return std::make_pair(memory_of(*transfer), to_tensor(transfer->position_bytes()));
  }
};

PyRecordTicket push_records(const PyRecordStream& self, const Kept& kept, const Tensor& numbers,
                            const Queries& queries, const std::optional<Tensor>& pair_item,
                            const std::optional<Tensor>& pair_query, bool is_urgent,
                            int64_t gap_bytes, double deadline_s, int threads) {
  check(*self.stream);
  free_kept();
  device::RecordRequest request;
  request.kept = kept;
  request.numbers = to_vector(numbers, "numbers", -1);
  check_records(request.numbers, kept->total);
  if (gap_bytes < 0 || !(deadline_s > 0))
    invalid("gap_bytes must not be negative and deadline_s must be positive");
  if (threads < 1) invalid("threads must be 1 or more");
  request.queries = to_queries(kept->rules, queries);
  const auto count = static_cast<int64_t>(request.numbers.size());
  if (pair_item && pair_query) {
    request.pair_item = to_vector(*pair_item, "pair_item", -1);
    request.pair_query =
        to_vector(*pair_query, "pair_query", static_cast<int64_t>(request.pair_item.size()));
    check_pairs(request.pair_item, request.pair_query, count, request.queries.size());
  } else if (request.queries.size() != 1) {
    invalid("several queries need pairs");
  }
  request.is_urgent = is_urgent;
  request.gap_bytes = gap_bytes;
  request.deadline_s = deadline_s;
  request.max_threads = threads;
  const size_t n_queries = request.queries.size();
  py::gil_scoped_release unlocked;
  return {self.stream, self.stream->push(std::move(request)), count, n_queries};
}

void bind_record_stream(py::module_& m) {
  py::class_<device::KeptRecords, std::shared_ptr<device::KeptRecords>>(m, "KeptRecords");
  m.def("keep_records", [](const Tensor& n_tokens, const Tensor& group_offset_bytes,
                           const Tensor& segment_begin, const Tensor& files, const py::dict& rules,
                           const std::optional<Tensor>& centroids,
                           const std::optional<Tensor>& bucket_weights) {
    return std::const_pointer_cast<device::KeptRecords>(keep_records(
        n_tokens, group_offset_bytes, segment_begin, files, rules, centroids, bucket_weights));
  });
  using device::RecordStream;
  py::class_<PyRecordStream>(m, "RecordStream")
      .def(py::init<const std::shared_ptr<io::Engine>&, int64_t, int>(), py::arg("engine"),
           py::arg("window_bytes"), py::arg("max_workers"))
      .def("push",
           [](const PyRecordStream& self, const std::shared_ptr<device::KeptRecords>& kept,
              const Tensor& numbers, const Queries& queries, const std::optional<Tensor>& pair_item,
              const std::optional<Tensor>& pair_query, bool is_urgent, int64_t gap_bytes,
              double deadline_s, int threads) {
             return push_records(self, kept, numbers, queries, pair_item, pair_query, is_urgent,
                                 gap_bytes, deadline_s, threads);
           })
      .def("clear",
           [](const PyRecordStream& self) {
             check(*self.stream);
             py::gil_scoped_release unlocked;
             self.stream->clear();
           })
      .def("stats", [](const PyRecordStream& self) {
        check(*self.stream);
        return to_dict(self.stream->stats());
      });
  py::class_<PyRecordTicket>(m, "RecordTicket")
      .def("next", &PyRecordTicket::next, py::arg("at_least"), py::arg("timeout_s"))
      .def("scores", &PyRecordTicket::scores)
      .def("score_more", &PyRecordTicket::score_more)
      .def("memory", &PyRecordTicket::memory)
      .def_property_readonly(
          "damaged", [](const PyRecordTicket& self) { return RecordStream::damaged(*self.ticket); })
      .def("costs",
           [](const PyRecordTicket& self) {
             check(*self.stream);
             RecordStream::Costs costs;
             {
               py::gil_scoped_release unlocked;
               costs = self.stream->costs(*self.ticket);
             }
             return py::make_tuple(costs.bytes_asked, costs.bytes_moved, costs.requests,
                                   costs.waiting_s, costs.computing_s, costs.age_s);
           })
      .def("forget", [](const PyRecordTicket& self) {
        check(*self.stream);
        py::gil_scoped_release unlocked;
        self.stream->forget(*self.ticket);
      });
}

}  // namespace

void bind_records(py::module_& m) {
  m.def("lay_out_records",
        [](const Tensor& n_tokens, int64_t fixed_bytes, int64_t row_bytes, int64_t begin_bytes) {
          const uint16_t* counts = token_counts(n_tokens);
          std::vector<int64_t> offsets(n_tokens.numel());
          const int64_t end = espnx::lay_out_records(
              counts, n_tokens.numel(), {fixed_bytes, row_bytes}, begin_bytes, offsets.data());
          return std::make_pair(to_tensor(std::move(offsets)), end);
        });
  m.def("locate_records",
        [](const Tensor& records, const Tensor& n_tokens, const Tensor& group_offset_bytes,
           const Tensor& segment_begin, int64_t fixed_bytes, int64_t row_bytes) {
          const std::vector<int64_t> wanted = to_vector(records, "records", -1);
          const std::vector<int64_t> begins = to_vector(segment_begin, "segment_begin", -1);
          const uint16_t* counts = token_counts(n_tokens);
          check_records(wanted, n_tokens.numel());
          const int64_t* groups = group_offsets(group_offset_bytes, n_tokens.numel());
          const auto count = static_cast<int64_t>(wanted.size());
          std::vector<int64_t> segment(count), offset(count), size(count);
          espnx::locate_records(wanted.data(), count, counts, groups, begins.data(),
                                static_cast<int64_t>(begins.size()), {fixed_bytes, row_bytes},
                                segment.data(), offset.data(), size.data());
          return std::make_tuple(to_tensor(std::move(segment)), to_tensor(std::move(offset)),
                                 to_tensor(std::move(size)));
        });
  bind_record_stream(m);
}

}  // namespace espnx::python
