// The tensor ops' versions for the CPU. espnx.ops registers them, the CUDA (Triton) and the
// shape-only versions as torch.ops.espnx.*. Nothing is computed here: arguments are checked, then
// handed on as raw pointers, with the GIL released.
#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "cpu/accelerator/accelerator.hpp"
#include "cpu/attention/batch.hpp"
#include "cpu/cpu_level.hpp"
#include "cpu/crc32c.hpp"
#include "cpu/distances/distances.hpp"
#include "cpu/gather.hpp"
#include "cpu/maxsim/maxsim.hpp"
#include "cpu/places.hpp"
#include "cpu/product/product.hpp"

namespace espnx::python {
namespace {

constexpr int kMaxThreads = 1024;
constexpr float kNobodyWrote =
    std::numeric_limits<float>::quiet_NaN();  // shows, where uninitialised memory may not

// Raises `Error`, a class of pybind11 for one of Python's, with what the parts say one after the
// other.
template <typename Error, typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Error(text.str());
}

template <typename... Parts>
void check(bool holds, const Parts&... parts) {
  if (!holds) fail<py::value_error>(parts...);
}

// The memory of an argument that must be contiguous: one that is not would have to be copied, which
// nobody would notice.
template <typename T>
T* memory(const Tensor& tensor, int64_t dim, Dtype dtype, const char* name, const char* expected) {
  check(tensor.dim() == dim && tensor.dtype() == dtype && tensor.is_cpu() && tensor.is_contiguous(),
        name, " must be a contiguous tensor on the CPU, ", expected, ", got ", tensor);
  check(tensor.is_aligned(), name, " must begin at a multiple of its elements' size (", expected,
        ")");
  return tensor.data<T>();
}

const int64_t* indices(const Tensor& tensor, const char* name) {
  return memory<const int64_t>(tensor, 1, Dtype::int64, name, "int64 [n]");
}

const uint8_t* bytes(const Tensor& buffer) {
  return memory<const uint8_t>(buffer, 1, Dtype::uint8, "buffer", "uint8 [bytes]");
}

int thread_count(int64_t threads) {
  check(threads >= 1, "threads must be 1 or more, got ", threads);
  return static_cast<int>(std::min<int64_t>(threads, kMaxThreads));
}

// The tables of a residual format, as the caller's tensors hold them; no other format has any.
espnx::MaxsimCodebook to_codebook(espnx::TokenFormat format, int64_t d,
                                  const std::optional<Tensor>& centroids,
                                  const std::optional<Tensor>& bucket_weights) {
  const int bits = espnx::residual_bits(format);
  check(centroids.has_value() == (bits > 0) && bucket_weights.has_value() == (bits > 0),
        "centroids and bucket_weights belong to residual formats, and to them alone");
  if (bits == 0) return {};
  const auto* rows =
      memory<const float>(*centroids, 2, Dtype::float32, "centroids", "float32 [K, d]");
  check(centroids->size(1) == d, "centroids must have ", d, " columns, got ", *centroids);
  const auto* weights =
      memory<const float>(*bucket_weights, 1, Dtype::float32, "bucket_weights", "float32 [2^bits]");
  check(bucket_weights->numel() == 1 << bits, "bucket_weights must have ", 1 << bits,
        " entries, got ", *bucket_weights);
  return {rows, centroids->size(0), weights};
}

NewTensor maxsim(const Tensor& query, const Tensor& buffer, const Tensor& offset_bytes,
                 const Tensor& n_tokens, const std::string& format, int64_t threads,
                 const std::optional<Tensor>& centroids,
                 const std::optional<Tensor>& bucket_weights) {
  const bool is_batch = query.dim() == 3;
  const auto* values = memory<const float>(query, is_batch ? 3 : 2, Dtype::float32, "query",
                                           "float32 [Lq, d] or [Q, Lq, d]");
  const int64_t d = query.size(-1), n = offset_bytes.numel();
  check(d % 8 == 0 && d >= 8 && d <= espnx::kMaxDim, "d must be a multiple of 8 from 8 to ",
        espnx::kMaxDim, ", got ", d);
  const espnx::MaxsimQueries queries{values, is_batch ? query.size(0) : 1, query.size(-2), d};
  espnx::TokenFormat token;
  check(espnx::parse_token_format(format.c_str(), &token), "unknown token format '", format, "'");
  const espnx::MaxsimDocuments docs{bytes(buffer),
                                    buffer.numel(),
                                    indices(offset_bytes, "offset_bytes"),
                                    indices(n_tokens, "n_tokens"),
                                    n,
                                    token,
                                    to_codebook(token, d, centroids, bucket_weights)};
  check(n_tokens.numel() == n, "n_tokens must have as many entries as offset_bytes (", n, "), got ",
        n_tokens);
  const int max_threads = thread_count(threads);
  NewFloats scores(is_batch ? std::vector{queries.n_queries, n} : std::vector{n});
  scores.fill(kNobodyWrote);
  int64_t outside = -1, unknown = -1;
  {
    py::gil_scoped_release unlocked;
    outside = espnx::find_record_outside(docs, d);
    if (outside < 0) unknown = espnx::maxsim(queries, docs, max_threads, scores.data());
  }
  if (outside >= 0) {
    fail<py::index_error>(
        "document ", outside, " (offset_bytes ", docs.offset_bytes[outside], ", n_tokens ",
        docs.n_tokens[outside], ", ", espnx::token_row_bytes(token, d),
        " bytes a token) does not lie inside the buffer of ", docs.buffer_bytes, " bytes");
  }
  if (unknown >= 0) {
    fail<py::index_error>("document ", unknown, " names a centroid that is not in the codebook");
  }
  return scores.tensor();
}

NewTensor crc32c_ranges(const Tensor& buffer, const Tensor& offset_bytes, const Tensor& size_bytes,
                        int64_t seed) {
  const uint8_t* data = bytes(buffer);
  const int64_t *offset = indices(offset_bytes, "offset_bytes"),
                *size = indices(size_bytes, "size_bytes");
  const int64_t n = offset_bytes.numel(), buffer_bytes = buffer.numel();
  check(size_bytes.numel() == n, "size_bytes must have as many entries as offset_bytes (", n,
        "), got ", size_bytes);
  check(seed >= 0 && seed <= 0xFFFFFFFF, "seed must be a 32-bit CRC, got ", seed);
  std::vector<int64_t> crc(n, -1);
  int64_t outside = -1;
  {
    py::gil_scoped_release unlocked;
    outside = espnx::look_at_records({offset, size, n, 1, buffer_bytes, buffer_bytes, 0}).outside;
    for (int64_t i = 0; i < n && outside < 0; ++i) {
      crc[i] = espnx::crc32c(static_cast<uint32_t>(seed), data + offset[i],
                             static_cast<size_t>(size[i]));
    }
  }
  if (outside >= 0) {
    fail<py::index_error>("range ", outside, " (offset_bytes ", offset[outside], ", size_bytes ",
                          size[outside], ") does not lie inside the buffer of ", buffer_bytes,
                          " bytes");
  }
  return to_tensor(std::move(crc));
}

// What `espnx::RecordsFound` says, in its order, of records of the buffer at `address`. `begin`:
// int64 [n + 1], filled with the counts' sums where it is given.
std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t> look_at_records(
    const Tensor& offset_bytes, const Tensor& count, int64_t unit_bytes, int64_t count_max,
    int64_t buffer_bytes, uint64_t address, const std::optional<Tensor>& begin) {
  const int64_t n = offset_bytes.numel();
  check(count.numel() == n, "count must have as many entries as offset_bytes (", n, "), got ",
        count);
  check(unit_bytes >= 1, "unit_bytes must be 1 or more, got ", unit_bytes);
  int64_t* sums = nullptr;
  if (begin) {
    sums = memory<int64_t>(*begin, 1, Dtype::int64, "begin", "int64 [n + 1]");
    check(begin->numel() == n + 1, "begin must have ", n + 1, " entries, got ", *begin);
  }
  const espnx::RecordPlaces places{indices(offset_bytes, "offset_bytes"),
                                   indices(count, "count"),
                                   n,
                                   unit_bytes,
                                   count_max,
                                   buffer_bytes,
                                   address};
  py::gil_scoped_release unlocked;
  const espnx::RecordsFound found = espnx::look_at_records(places, sums);
  return {found.outside, found.address_multiple, found.count_multiple, found.count_most,
          found.total};
}

// What `espnx::BlocksFound` says, in its order, of blocks of the buffer at `address`.
std::tuple<bool, int64_t, int64_t> look_at_blocks(const Tensor& offset_bytes, const Tensor& n_rows,
                                                  int64_t block_rows, int64_t block_bytes,
                                                  int64_t rows_max, int64_t buffer_bytes,
                                                  uint64_t address) {
  const auto* offsets = memory<const int64_t>(offset_bytes, 3, Dtype::int64, "offset_bytes",
                                              "int64 [B, n_kv, n_blocks]");
  const int64_t n = offset_bytes.size(0), n_blocks = offset_bytes.size(2);
  check(n_rows.numel() == n, "n_rows must have ", n, " entries, got ", n_rows);
  check(block_rows >= 1 && block_bytes >= 1, "block_rows and block_bytes must be 1 or more, got ",
        block_rows, " and ", block_bytes);
  check(rows_max <= n_blocks * block_rows, "rows_max must be at most ", n_blocks * block_rows,
        ", got ", rows_max);
  const espnx::BlockPlaces places{offsets,
                                  indices(n_rows, "n_rows"),
                                  n,
                                  offset_bytes.size(1),
                                  n_blocks,
                                  block_rows,
                                  block_bytes,
                                  rows_max,
                                  buffer_bytes,
                                  address};
  py::gil_scoped_release unlocked;
  const espnx::BlocksFound found = espnx::look_at_blocks(places);
  return {found.is_right, found.address_multiple, found.rows_most};
}

// The bytes of each of the tables, at the next multiple of 16 in `out`; what is between them stays
// as it is.
void pack(const std::vector<Tensor>& tables, const Tensor& out) {
  auto* to = memory<uint8_t>(out, 1, Dtype::uint8, "out", "uint8 [bytes]");
  int64_t at = 0;
  for (const Tensor& table : tables) {
    check(table.is_cpu() && table.is_contiguous(),
          "tables must be contiguous tensors on the CPU, got ", table);
    const int64_t size = table.numel() * table.item_bytes();
    check(size <= out.numel() - at, "out is too short: it has ", out.numel(), " bytes");
    if (size > 0) std::memcpy(to + at, table.data<const uint8_t>(), static_cast<size_t>(size));
    at = std::min((at + size + 15) / 16 * 16, out.numel());
  }
}

// Record i, `begin[i + 1] - begin[i]` bytes at `offset_bytes[i]` of the buffer, to byte `begin[i]`
// of `out`.
void gather(const Tensor& buffer, const Tensor& offset_bytes, const Tensor& begin,
            const Tensor& out, int64_t threads) {
  const uint8_t* data = bytes(buffer);
  auto* made = memory<uint8_t>(out, 1, Dtype::uint8, "out", "uint8 [bytes]");
  const int64_t *offset = indices(offset_bytes, "offset_bytes"), *at = indices(begin, "begin");
  const int64_t n = offset_bytes.numel(), buffer_bytes = buffer.numel();
  check(begin.numel() == n + 1, "begin must have ", n + 1, " entries, got ", begin);
  check(at[0] == 0 && at[n] == out.numel(), "begin must go from 0 to the size of out (",
        out.numel(), "), got ", at[0], " and ", at[n]);
  const int max_threads = thread_count(threads);
  int64_t outside = -1;
  {
    py::gil_scoped_release unlocked;
    for (int64_t i = 0; i < n && outside < 0; ++i) {
      const bool fits = at[i] <= at[i + 1] && offset[i] >= 0 && offset[i] <= buffer_bytes &&
                        at[i + 1] - at[i] <= buffer_bytes - offset[i];
      if (!fits) outside = i;
    }
    if (outside < 0) {
      espnx::gather(data, offset, at, n, max_threads, made);
    }
  }
  if (outside >= 0) {
    fail<py::index_error>("record ", outside, " (offset_bytes ", offset[outside], ", ",
                          at[outside + 1] - at[outside],
                          " bytes) does not lie inside the buffer of ", buffer_bytes, " bytes");
  }
}

// `query` [d] or [Q, d]: of whole numbers the vectors' own bytes, else float32.
std::vector<espnx::DistanceQuery> to_distance_queries(const Tensor& query,
                                                      espnx::VectorFormat format,
                                                      espnx::Metric metric) {
  const bool is_whole = espnx::is_whole(format);
  const int64_t dim = query.dim() == 2 ? 2 : 1;
  const uint8_t* values =
      is_whole ? memory<const uint8_t>(query, dim, Dtype::uint8, "query", "bytes [d] or [Q, d]")
               : reinterpret_cast<const uint8_t*>(memory<const float>(
                     query, dim, Dtype::float32, "query", "float32 [d] or [Q, d]"));
  const int64_t d = query.size(-1), n = dim == 2 ? query.size(0) : 1;
  check(d >= 1 && d <= espnx::kMaxVectorDim, "d must be 1 to ", espnx::kMaxVectorDim, ", got ", d);
  std::vector<espnx::DistanceQuery> queries;
  for (int64_t q = 0; q < n; ++q) {
    queries.emplace_back(values + q * d * (is_whole ? 1 : static_cast<int64_t>(sizeof(float))), d,
                         format, metric);
  }
  return queries;
}

NewTensor distances(const Tensor& query, const Tensor& buffer, const Tensor& offset_bytes,
                    const std::string& format, const std::string& metric, int64_t threads) {
  const int of_format = espnx::number_of(espnx::kVectorFormatNames, format.c_str());
  const int of_metric = espnx::number_of(espnx::kMetricNames, metric.c_str());
  check(of_format >= 0, "unknown format of vectors '", format, "'");
  check(of_metric >= 0, "unknown metric '", metric, "'");
  const auto queries = to_distance_queries(query, static_cast<espnx::VectorFormat>(of_format),
                                           static_cast<espnx::Metric>(of_metric));
  const espnx::DistanceVectors vectors{bytes(buffer), buffer.numel(),
                                       indices(offset_bytes, "offset_bytes"), offset_bytes.numel()};
  const int max_threads = thread_count(threads);
  const auto n_queries = static_cast<int64_t>(queries.size());
  NewFloats found(query.dim() == 2 ? std::vector{n_queries, vectors.n} : std::vector{vectors.n});
  found.fill(kNobodyWrote);
  int64_t outside = -1;
  if (n_queries > 0) {
    py::gil_scoped_release unlocked;
    outside = espnx::find_vector_outside(vectors, queries[0].vector_bytes());
    if (outside < 0)
      espnx::distances(queries.data(), n_queries, vectors, max_threads, found.data());
  }
  if (outside >= 0) {
    fail<py::index_error>("vector ", outside, " (offset_bytes ", vectors.offset_bytes[outside],
                          ", ", queries[0].vector_bytes(),
                          " bytes) does not lie inside the buffer of ", vectors.buffer_bytes,
                          " bytes");
  }
  return found.tensor();
}

void check_rows(const espnx::AttentionBatch& batch) {
  for (const int64_t dim : {batch.d, batch.dv}) {
    check(dim % 8 == 0 && dim >= 8 && dim <= espnx::kMaxHeadDim,
          "d and dv must be multiples of 8 from 8 to ", espnx::kMaxHeadDim, ", got ", dim);
  }
  check(batch.block_rows >= 1 && batch.block_rows <= 1 << 20, "block_rows must be 1 to ", 1 << 20,
        ", got ", batch.block_rows);
  check(!batch.is_x || batch.format != espnx::RowFormat::int8, "X rows (dv 0) have no int8 format");
  for (int64_t i = 0; i < batch.n; ++i) {
    const int64_t rows = batch.n_rows[i];
    check(rows >= 0 && rows <= batch.n_blocks * batch.block_rows, "n_rows of sequence ", i,
          " must be 0 to ", batch.n_blocks * batch.block_rows, ", what its blocks hold, got ",
          rows);
    check(batch.visible == nullptr || rows <= batch.visible_stride, "visible has ",
          batch.visible_stride, " entries a sequence, but sequence ", i, " has ", rows, " rows");
  }
  const int64_t outside = espnx::find_block_outside(batch);
  if (outside >= 0) {
    fail<py::index_error>("block ", outside, " (offset_bytes ", batch.block_offset_bytes[outside],
                          ", ", espnx::attention_block_bytes(batch),
                          " bytes) does not lie inside the buffer of ", batch.buffer_bytes,
                          " bytes");
  }
}

// `query` float32 [B, H, q, d].
std::pair<NewTensor, NewTensor> attention(const Tensor& query, const Tensor& buffer,
                                          const Tensor& block_offset_bytes, const Tensor& n_rows,
                                          int64_t block_rows, const std::string& format,
                                          double scale, int64_t dv,
                                          const std::optional<Tensor>& visible,
                                          const std::optional<Tensor>& last_position,
                                          int64_t threads) {
  const auto* q = memory<const float>(query, 4, Dtype::float32, "query", "float32 [B, H, q, d]");
  const auto* offsets = memory<const int64_t>(block_offset_bytes, 3, Dtype::int64,
                                              "block_offset_bytes", "int64 [B, n_kv, n_blocks]");
  const int64_t n = query.size(0), heads = query.size(1), q_len = query.size(2), d = query.size(3);
  const int64_t n_kv = block_offset_bytes.size(1);
  check(block_offset_bytes.size(0) == n && n_rows.numel() == n,
        "block_offset_bytes and n_rows must have the query's batch size ", n);
  check(n_kv > 0 && heads % n_kv == 0, "query heads (", heads,
        ") must be a multiple of the KV heads (", n_kv, ")");
  espnx::RowFormat row;
  check(espnx::parse_row_format(format.c_str(), &row), "unknown row format '", format, "'");
  const uint8_t* seen = nullptr;
  if (visible) {
    seen = memory<const uint8_t>(*visible, 2, Dtype::uint8, "visible", "uint8 [B, rows]");
    check(visible->size(0) == n, "visible must have ", n, " rows, got ", *visible);
  }
  const int64_t* last = nullptr;
  if (last_position) {
    last = memory<const int64_t>(*last_position, 2, Dtype::int64, "last_position", "int64 [B, q]");
    check(last_position->size(0) == n && last_position->size(1) == q_len, "last_position must be [",
          n, ", ", q_len, "], got ", *last_position);
  }
  const int64_t count = query.numel();
  espnx::AlignedFloats scaled(count);
  const espnx::AttentionBatch batch{scaled.data(),
                                    n,
                                    n_kv,
                                    heads / n_kv * q_len,
                                    d,
                                    dv == 0 ? d : dv,
                                    q_len,
                                    bytes(buffer),
                                    buffer.numel(),
                                    offsets,
                                    block_offset_bytes.size(2),
                                    indices(n_rows, "n_rows"),
                                    block_rows,
                                    row,
                                    dv == 0,
                                    seen,
                                    visible ? visible->size(1) : 0,
                                    last};
  check_rows(batch);
  const int max_threads = thread_count(threads);
  NewFloats o({n, heads, q_len, batch.dv}), lse({n, heads, q_len});
  lse.fill(kNobodyWrote);
  {
    py::gil_scoped_release unlocked;
    std::transform(q, q + count, scaled.data(),
                   [by = static_cast<float>(scale)](float x) { return x * by; });
    espnx::attend_batch(batch, max_threads, o.data(), lse.data());
  }
  return {o.tensor(), lse.tensor()};
}

const int64_t* optional_indices(const std::optional<Tensor>& tensor, const char* name,
                                int64_t count) {
  if (!tensor) return nullptr;
  check(tensor->numel() == count, name, " must have ", count, " entries, got ", *tensor);
  return indices(*tensor, name);
}

const uint16_t* halves(const Tensor& tensor, int64_t dim, const char* name, const char* expected) {
  const auto* data = memory<const uint16_t>(tensor, dim, Dtype::float16, name, expected);
  check(tensor.size(-1) == espnx::accelerator::kDim, name, " must have rows of ",
        espnx::accelerator::kDim, ", got ", tensor);
  return data;
}

// What waits on the host: both or neither.
void add_buffered(espnx::accelerator::Task& task, const std::optional<Tensor>& scores,
                  const std::optional<Tensor>& values, int64_t position) {
  check(scores.has_value() == values.has_value(),
        "scores and values of buffered rows come together");
  if (!scores) return;
  task.scores = memory<const float>(*scores, 4, Dtype::float32, "scores", "float32 [B, H, n, t]");
  task.values = halves(*values, 4, "values", "float16 [B, H, t, 128]");
  task.n_buffered = scores->size(3), task.buffered_position = position;
  check(scores->size(0) == task.n_sequences && scores->size(1) == task.n_heads &&
            scores->size(2) == task.n && values->size(0) == task.n_sequences &&
            values->size(1) == task.n_heads && values->size(2) == task.n_buffered,
        "scores and values must be of the query's sequences, heads and rows, got ", *scores,
        " and ", *values);
  check(position >= 0 &&
            (task.visible == nullptr || position + task.n_buffered <= task.visible_stride),
        "buffered rows from position ", position, " on are not among those that visible has");
}

std::pair<NewTensor, NewTensor> accelerator(
    const Tensor& query, const Tensor& buffer, const Tensor& pieces, int64_t block_rows,
    double scale, const std::optional<Tensor>& first_visible, const std::optional<Tensor>& visible,
    const std::optional<Tensor>& last_position, const std::optional<Tensor>& scores,
    const std::optional<Tensor>& values, int64_t buffered_position, int64_t threads) {
  namespace accelerator = espnx::accelerator;
  accelerator::Task task{};
  task.query = halves(query, 4, "query", "float16 [B, H, n, 128]");
  task.n_sequences = query.size(0), task.n_heads = query.size(1), task.n = query.size(2);
  task.scale = static_cast<float>(scale);
  check(block_rows >= 1 && block_rows <= 1 << 20, "block_rows must be 1 to ", 1 << 20, ", got ",
        block_rows);
  task.buffer = bytes(buffer), task.buffer_bytes = buffer.numel(), task.block_rows = block_rows;
  const auto* table = memory<const int64_t>(pieces, 2, Dtype::int64, "pieces", "int64 [pieces, 5]");
  check(pieces.size(1) == 5, "pieces must have 5 columns, got ", pieces);
  task.pieces = reinterpret_cast<const accelerator::Piece*>(table), task.n_pieces = pieces.size(0);
  task.first_visible = optional_indices(first_visible, "first_visible", task.n_sequences);
  task.last_position = optional_indices(last_position, "last_position", task.n);
  if (visible) {
    task.visible =
        memory<const uint8_t>(*visible, 2, Dtype::uint8, "visible", "uint8 [B, positions]");
    check(visible->size(0) == task.n_sequences, "visible must have ", task.n_sequences,
          " rows, got ", *visible);
    task.visible_stride = visible->size(1);
  }
  add_buffered(task, scores, values, buffered_position);
  const int max_threads = thread_count(threads);
  const int64_t bad = accelerator::find_bad_piece(task);
  if (bad >= 0) {
    const accelerator::Piece& piece = task.pieces[bad];
    fail<py::index_error>("piece ", bad, " (sequence ", piece.sequence, ", head ", piece.head,
                          ", offset_bytes ", piece.offset_bytes, ", n_rows ", piece.n_rows,
                          ", first_position ", piece.first_position,
                          ") is not of the query's sequences and heads, within the buffer of ",
                          task.buffer_bytes, " bytes and the positions that visible has");
  }
  const auto o = std::make_shared<std::vector<uint16_t>>(query.numel());
  NewFloats lse({task.n_sequences, task.n_heads, task.n});
  {
    py::gil_scoped_release unlocked;
    accelerator::attend(task, max_threads, o->data(), lse.data());
  }
  return {NewTensor(o->data(), Dtype::float16,
                    {task.n_sequences, task.n_heads, task.n, accelerator::kDim}, o),
          lse.tensor()};
}

NewTensor accelerator_scores(const Tensor& query, const Tensor& rows, double scale,
                             int64_t threads) {
  const uint16_t* q = halves(query, 4, "query", "float16 [B, H, n, 128]");
  const uint16_t* k = halves(rows, 4, "rows", "float16 [B, H, t, 128]");
  check(query.size(0) == rows.size(0) && query.size(1) == rows.size(1),
        "rows must be of the query's heads, got ", rows);
  const int64_t n = query.size(2), n_rows = rows.size(2), n_units = query.size(0) * query.size(1);
  const int max_threads = thread_count(threads);
  NewFloats scores({query.size(0), query.size(1), n, n_rows});
  {
    py::gil_scoped_release unlocked;
    espnx::accelerator::score(q, k, n_units, n, n_rows, static_cast<float>(scale), max_threads,
                              scores.data());
  }
  return scores.tensor();
}

int64_t cpu_level() { return static_cast<int64_t>(espnx::cpu_level()); }

int64_t set_cpu_level(int64_t level) {
  check(espnx::set_cpu_level(static_cast<int>(std::clamp<int64_t>(level, -1, 99))),
        "this processor's best level is ", static_cast<int64_t>(espnx::best_cpu_level()),
        " (0 portable, 1 AVX2, 2 AVX-512, 3 VNNI, 4 AMX), got ", level);
  return cpu_level();
}

ProductParts to_parts(const Tensor& begin, int64_t dim) {
  const auto* at = indices(begin, "begin");
  ProductParts parts{dim, {at, at + begin.numel()}};
  check(parts.count() >= 1 && at[0] == 0 && at[parts.count()] == dim, "begin must go from 0 to ",
        dim, ", got ", begin);
  for (int64_t part = 0; part < parts.count(); ++part) {
    check(at[part] < at[part + 1], "part ", part, " is empty");
  }
  return parts;
}

NewTensor fit_product(const Tensor& vectors, const Tensor& begin, int64_t rounds, uint64_t seed,
                      int64_t threads) {
  const auto* values =
      memory<const float>(vectors, 2, Dtype::float32, "vectors", "float32 [n, dim]");
  const ProductParts parts = to_parts(begin, vectors.size(1));
  check(vectors.size(0) >= 1, "centroids need vectors, got ", vectors);
  check(rounds >= 1 && rounds <= 1000, "rounds must be 1 to 1000, got ", rounds);
  const int max_threads = thread_count(threads);
  NewFloats centroids({kCentroids, parts.dim});
  {
    py::gil_scoped_release unlocked;
    espnx::fit_product(parts, values, vectors.size(0), static_cast<int>(rounds), seed, max_threads,
                       centroids.data());
  }
  return centroids.tensor();
}

NewTensor encode_product(const Tensor& vectors, const Tensor& begin, const Tensor& centroids,
                         int64_t threads) {
  const auto* values =
      memory<const float>(vectors, 2, Dtype::float32, "vectors", "float32 [n, dim]");
  const ProductParts parts = to_parts(begin, vectors.size(1));
  const auto* means =
      memory<const float>(centroids, 2, Dtype::float32, "centroids", "float32 [256, dim]");
  check(centroids.size(0) == kCentroids && centroids.size(1) == parts.dim,
        "centroids must be [256, ", parts.dim, "], got ", centroids);
  const int max_threads = thread_count(threads);
  auto codes = std::make_shared<std::vector<uint8_t>>(vectors.size(0) * parts.count());
  {
    py::gil_scoped_release unlocked;
    espnx::encode_product(parts, means, values, vectors.size(0), max_threads, codes->data());
  }
  return {codes->data(), Dtype::uint8, {vectors.size(0), parts.count()}, codes};
}

}  // namespace

void bind_ops(py::module_& m) {
  m.def("maxsim", &maxsim);
  m.def("crc32c_ranges", &crc32c_ranges);
  m.def("gather", &gather);
  m.def("look_at_records", &look_at_records);
  m.def("look_at_blocks", &look_at_blocks);
  m.def("pack", &pack);
  m.def("distances", &distances);
  m.def("fit_product", &fit_product);
  m.def("encode_product", &encode_product);
  m.def("attention", &attention);
  m.def("accelerator", &accelerator);
  m.def("accelerator_scores", &accelerator_scores);
  // For tests and benchmarks: the instruction set in force in this process (0 portable, 1 AVX2, 2
  // AVX-512, 3 VNNI, 4 AMX; -1 restores the best).
  m.def("cpu_level", &cpu_level);
  m.def("set_cpu_level", &set_cpu_level);
}

}  // namespace espnx::python
