// Records in Python: where they lie, reading them, and scoring them as they arrive.
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <tuple>

#include "bindings.hpp"
#include "cpu/record_score.hpp"
#include "cpu/records.hpp"

namespace espnx::python {
namespace {

const uint16_t* token_counts(const at::Tensor& n_tokens) {
  if (!n_tokens.device().is_cpu() || n_tokens.scalar_type() != at::kUInt16 || !n_tokens.is_contiguous()) {
    invalid("n_tokens must be a contiguous uint16 tensor on the CPU");
  }
  return static_cast<const uint16_t*>(n_tokens.const_data_ptr());
}

void check_records(const std::vector<int64_t>& records, int64_t total) {
  for (const int64_t record : records) {
    if (record < 0 || record >= total) invalid("record " + std::to_string(record) + " is not in the store");
  }
}

const int64_t* group_offsets(const at::Tensor& group_offset_bytes, int64_t total) {
  if (group_offset_bytes.scalar_type() != at::kLong || group_offset_bytes.numel() * espnx::kGroupRecords < total) {
    invalid("group_offset_bytes must be int64 with one entry for every 64 records");
  }
  return group_offset_bytes.const_data_ptr<int64_t>();
}

// Submits a read of whole records: `locate_records` and `submit` in one call, without tensors between.
Future read_records(const std::shared_ptr<io::Engine>& engine, const at::Tensor& records, const at::Tensor& n_tokens,
                    const at::Tensor& group_offset_bytes, const at::Tensor& segment_begin, const at::Tensor& files,
                    int64_t fixed_bytes, int64_t row_bytes, int64_t gap_bytes, int priority, double deadline_s) {
  Remains::free();
  const std::vector<int64_t> wanted = to_vector(records, "records", -1);
  const std::vector<int64_t> begins = to_vector(segment_begin, "segment_begin", -1);
  const std::vector<int64_t> numbers = to_vector(files, "files", static_cast<int64_t>(begins.size()));
  const uint16_t* counts = token_counts(n_tokens);
  const int64_t* groups = group_offsets(group_offset_bytes, n_tokens.numel());
  check_records(wanted, n_tokens.numel());
  if (gap_bytes < 0 || !(deadline_s > 0)) invalid("gap_bytes must not be negative and deadline_s must be positive");
  py::gil_scoped_release unlocked;
  io::TransferSpec spec;
  spec.gap_bytes = gap_bytes;
  spec.priority = priority;
  spec.deadline_s = deadline_s;
  spec.file.resize(wanted.size());
  spec.offset_bytes.resize(wanted.size());
  spec.size_bytes.resize(wanted.size());
  espnx::locate_records(wanted.data(), static_cast<int64_t>(wanted.size()), counts, groups, begins.data(),
                        static_cast<int64_t>(begins.size()), {fixed_bytes, row_bytes}, spec.file.data(),
                        spec.offset_bytes.data(), spec.size_bytes.data());
  for (int64_t& file : spec.file) file = numbers[file];
  return {engine, engine->submit(std::move(spec))};
}

const float* float_values(const at::Tensor& tensor, const char* name) {
  if (!tensor.device().is_cpu() || tensor.scalar_type() != at::kFloat || !tensor.is_contiguous()) {
    invalid(std::string(name) + " must be a contiguous float32 tensor on the CPU");
  }
  return tensor.const_data_ptr<float>();
}

espnx::TokenFormat to_format(const std::string& name) {
  espnx::TokenFormat format;
  if (!espnx::parse_token_format(name.c_str(), &format)) invalid("unknown token format '" + name + "'");
  return format;
}

using Queries = std::vector<std::tuple<at::Tensor, at::Tensor, double>>;  // tokens, CLS, weight of CLS

espnx::RecordRules to_rules(const py::dict& rules, const std::optional<at::Tensor>& centroids,
                            const std::optional<at::Tensor>& bucket_weights) {
  espnx::RecordRules common{rules["salt"].cast<uint32_t>(),
                            rules["format_number"].cast<uint8_t>(),
                            {rules["fixed_bytes"].cast<int64_t>(), rules["row_bytes"].cast<int64_t>()},
                            to_format(rules["format"].cast<std::string>()),
                            to_format(rules["cls_format"].cast<std::string>()),
                            rules["dim"].cast<int64_t>(),
                            rules["d_cls"].cast<int64_t>(),
                            {}};
  const int residual_bits = espnx::residual_bits(common.tokens);
  if ((residual_bits > 0) != (centroids && bucket_weights)) invalid("a codebook belongs to residual formats alone");
  if (residual_bits > 0) {
    const bool fits = centroids->dim() == 2 && centroids->size(1) == common.dim;
    if (!fits || bucket_weights->numel() != 1 << residual_bits) invalid("the codebook does not fit the records");
    common.codebook = {float_values(*centroids, "centroids"), centroids->size(0),
                       float_values(*bucket_weights, "bucket_weights")};
  }
  return common;
}

std::vector<espnx::RecordQuery> to_queries(const espnx::RecordRules& common, const Queries& queries) {
  std::vector<espnx::RecordQuery> wanted;
  for (const auto& [tokens, cls, weight] : queries) {
    if (tokens.dim() != 2 || tokens.size(1) != common.dim || cls.numel() < common.d_cls) {
      invalid("a query does not have the records' dimensions");
    }
    wanted.push_back(
        {float_values(tokens, "tokens"), tokens.size(0), float_values(cls, "cls"), static_cast<float>(weight)});
  }
  return wanted;
}

// Waits for the records of a read, checks and scores them as they arrive, all without the GIL.
// Returns (float32 scores, seconds of checking and scoring, seconds of waiting, first damaged item or -1).
py::tuple score_arrivals(Future& future, const at::Tensor& numbers, const at::Tensor& n_tokens, const py::dict& rules,
                         const std::optional<at::Tensor>& centroids, const std::optional<at::Tensor>& bucket_weights,
                         const Queries& queries, const std::optional<at::Tensor>& pair_item,
                         const std::optional<at::Tensor>& pair_query, int64_t at_least) {
  future.check();
  const auto& positions = future.transfer->position_bytes();
  const auto count = static_cast<int64_t>(positions.size());
  const std::vector<int64_t> records = to_vector(numbers, "numbers", count);
  const uint16_t* counts = token_counts(n_tokens);
  check_records(records, n_tokens.numel());
  const espnx::RecordRules common = to_rules(rules, centroids, bucket_weights);
  std::vector<espnx::RecordQuery> wanted = to_queries(common, queries);
  std::vector<int64_t> items, by_query;
  espnx::RecordPairs pairs;
  if (pair_item && pair_query) {
    items = to_vector(*pair_item, "pair_item", -1);
    by_query = to_vector(*pair_query, "pair_query", static_cast<int64_t>(items.size()));
    for (size_t i = 0; i < items.size(); ++i) {
      if (items[i] < 0 || items[i] >= count || by_query[i] < 0 || by_query[i] >= static_cast<int64_t>(wanted.size())) {
        invalid("a pair names an item or a query that is not there");
      }
    }
    pairs = {items.data(), by_query.data(), static_cast<int64_t>(items.size())};
  } else if (wanted.size() != 1) {
    invalid("several queries need pairs");
  }
  at::Tensor scores = at::empty({pairs.item ? pairs.count : count}, at::kFloat);
  const espnx::RecordItems arrived{reinterpret_cast<const uint8_t*>(future.transfer->memory()),
                                   future.transfer->memory_bytes(), positions.data(), records.data(), counts};
  espnx::RecordScorer scorer(common, arrived, std::move(wanted), pairs, at::get_num_threads(),
                             scores.data_ptr<float>());
  using Seconds = std::chrono::duration<double>;
  Seconds scoring{0}, waiting{0};
  int64_t damaged = -1;
  bool finished = count == 0;
  std::vector<int64_t> batch;
  while (!finished && damaged < 0) {
    {
      py::gil_scoped_release unlocked;
      const auto begun = io::Clock::now();
      finished = future.transfer->next(batch, std::max<int64_t>(1, at_least - static_cast<int64_t>(batch.size())),
                                       kSignalCheckNs);
      const auto waited = io::Clock::now();
      waiting += waited - begun;
      if (finished || static_cast<int64_t>(batch.size()) >= at_least) {
        damaged = espnx::find_damaged(common, arrived, batch);
        if (damaged < 0) damaged = scorer.score(batch);
        batch.clear();
        scoring += io::Clock::now() - waited;
      }
    }
    if (!finished && PyErr_CheckSignals() != 0) {
      future.cancel();
      throw py::error_already_set();
    }
  }
  return py::make_tuple(scores, scoring.count(), waiting.count(), damaged);
}

}  // namespace

void bind_records(py::module_& m) {
  m.def("lay_out_records", [](const at::Tensor& n_tokens, int64_t fixed_bytes, int64_t row_bytes, int64_t begin_bytes) {
    std::vector<int64_t> offsets(n_tokens.numel());
    const int64_t end = espnx::lay_out_records(token_counts(n_tokens), n_tokens.numel(), {fixed_bytes, row_bytes},
                                               begin_bytes, offsets.data());
    return std::make_pair(to_tensor(offsets), end);
  });
  m.def("locate_records",
        [](const at::Tensor& records, const at::Tensor& n_tokens, const at::Tensor& group_offset_bytes,
           const at::Tensor& segment_begin, int64_t fixed_bytes, int64_t row_bytes) {
          const std::vector<int64_t> wanted = to_vector(records, "records", -1);
          const std::vector<int64_t> begins = to_vector(segment_begin, "segment_begin", -1);
          const uint16_t* counts = token_counts(n_tokens);
          check_records(wanted, n_tokens.numel());
          const int64_t* groups = group_offsets(group_offset_bytes, n_tokens.numel());
          const auto count = static_cast<int64_t>(wanted.size());
          at::Tensor segment = at::empty({count}, at::kLong), offset = at::empty({count}, at::kLong),
                     size = at::empty({count}, at::kLong);
          espnx::locate_records(wanted.data(), count, counts, groups, begins.data(),
                                static_cast<int64_t>(begins.size()), {fixed_bytes, row_bytes},
                                segment.data_ptr<int64_t>(), offset.data_ptr<int64_t>(), size.data_ptr<int64_t>());
          return std::make_tuple(segment, offset, size);
        });
  m.def("read_records", &read_records);
  m.def("score_arrivals", &score_arrivals);
}

}  // namespace espnx::python
