// The tensor ops torch.ops.espnx.*: schemas and CPU versions. espnx.ops registers the CUDA (Triton) and
// shape-only versions from Python. Nothing is computed here: arguments are checked, then handed on as raw
// pointers.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

#include "cpu/attention/batch.hpp"
#include "cpu/cpu_level.hpp"
#include "cpu/crc32c.hpp"
#include "cpu/maxsim/maxsim.hpp"

namespace {

void check_vector(const at::Tensor& tensor, at::ScalarType dtype, const char* name) {
  TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.scalar_type() == dtype, name, " must be a 1-D ", dtype, " tensor, got ",
                    tensor.dim(), "-D ", tensor.scalar_type());
}

// An I/O buffer is read where it lies; a strided view of one would have to be copied, which nobody would
// notice.
void check_buffer(const at::Tensor& buffer) {
  check_vector(buffer, at::kByte, "buffer");
  TORCH_CHECK_VALUE(buffer.is_contiguous(), "buffer must be contiguous");
}

// Dispatch looks at all arguments together, so one of them may still be elsewhere.
void check_cpu(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), "all tensors must be on the CPU, got one on ", tensor.device());
}

espnx::TokenFormat parse_format(const std::string& name) {
  espnx::TokenFormat format;
  TORCH_CHECK_VALUE(espnx::parse_token_format(name.c_str(), &format), "unknown token format '", name, "'");
  return format;
}

// The tables of a residual format, as the caller's tensors hold them; no other format has any.
espnx::MaxsimCodebook check_codebook(espnx::TokenFormat format, int64_t d, const std::optional<at::Tensor>& centroids,
                                     const std::optional<at::Tensor>& bucket_weights) {
  const int bits = espnx::residual_bits(format);
  TORCH_CHECK_VALUE(centroids.has_value() == (bits > 0) && bucket_weights.has_value() == (bits > 0),
                    "centroids and bucket_weights belong to residual formats, and to them alone");
  if (bits == 0) return {};
  check_cpu(*centroids);
  check_cpu(*bucket_weights);
  check_vector(*bucket_weights, at::kFloat, "bucket_weights");
  TORCH_CHECK_VALUE(centroids->dim() == 2 && centroids->scalar_type() == at::kFloat && centroids->size(1) == d,
                    "centroids must be a float32 tensor [K, ", d, "], got ", centroids->dim(), "-D ",
                    centroids->scalar_type());
  TORCH_CHECK_VALUE(bucket_weights->numel() == 1 << bits, "bucket_weights must have ", 1 << bits, " entries, got ",
                    bucket_weights->numel());
  TORCH_CHECK_VALUE(centroids->is_contiguous() && bucket_weights->is_contiguous(),
                    "centroids and bucket_weights must be contiguous");
  return {centroids->const_data_ptr<float>(), centroids->size(0), bucket_weights->const_data_ptr<float>()};
}

at::Tensor maxsim_cpu(const at::Tensor& query, const at::Tensor& buffer, const at::Tensor& offset_bytes,
                      const at::Tensor& n_tokens, const std::string& format, int64_t threads,
                      const std::optional<at::Tensor>& centroids, const std::optional<at::Tensor>& bucket_weights) {
  TORCH_CHECK_VALUE((query.dim() == 2 || query.dim() == 3) && query.scalar_type() == at::kFloat,
                    "query must be a float32 tensor [Lq, d] or [Q, Lq, d], got ", query.dim(), "-D ",
                    query.scalar_type());
  check_buffer(buffer);
  check_vector(offset_bytes, at::kLong, "offset_bytes");
  check_vector(n_tokens, at::kLong, "n_tokens");
  for (const at::Tensor* tensor : {&query, &buffer, &offset_bytes, &n_tokens}) check_cpu(*tensor);
  const int64_t d = query.size(-1), n = offset_bytes.numel();
  TORCH_CHECK_VALUE(d % 8 == 0 && d >= 8 && d <= espnx::kMaxDim, "d must be a multiple of 8 from 8 to ", espnx::kMaxDim,
                    ", got ", d);
  TORCH_CHECK_VALUE(n_tokens.numel() == n, "n_tokens must have as many entries as offset_bytes (", n, "), got ",
                    n_tokens.numel());
  TORCH_CHECK_VALUE(threads >= 0, "threads must be 0 (choose) or more, got ", threads);

  const at::Tensor values = query.contiguous(), offsets = offset_bytes.contiguous(), counts = n_tokens.contiguous();
  const bool is_batch = query.dim() == 3;
  const espnx::MaxsimQueries queries{values.const_data_ptr<float>(), is_batch ? query.size(0) : 1, query.size(-2), d};
  const espnx::TokenFormat token = parse_format(format);
  const espnx::MaxsimDocuments docs{buffer.const_data_ptr<uint8_t>(),
                                    buffer.numel(),
                                    offsets.const_data_ptr<int64_t>(),
                                    counts.const_data_ptr<int64_t>(),
                                    n,
                                    token,
                                    check_codebook(token, d, centroids, bucket_weights)};
  const int64_t outside = espnx::find_record_outside(docs, d);
  TORCH_CHECK_INDEX(outside < 0, "document ", outside, " (offset_bytes ", docs.offset_bytes[outside], ", n_tokens ",
                    docs.n_tokens[outside], ", ", espnx::token_row_bytes(docs.format, d),
                    " bytes a token) does not lie inside the buffer of ", docs.buffer_bytes, " bytes");
  at::Tensor scores = is_batch ? at::empty({queries.n_queries, n}, query.options()) : at::empty({n}, query.options());
  const int max_threads = static_cast<int>(threads > 0 ? std::min<int64_t>(threads, 1024) : at::get_num_threads());
  const int64_t unknown = espnx::maxsim(queries, docs, max_threads, scores.mutable_data_ptr<float>());
  TORCH_CHECK_INDEX(unknown < 0, "document ", unknown, " names a centroid that is not in the codebook");
  return scores;
}

at::Tensor crc32c_cpu(const at::Tensor& buffer, const at::Tensor& offset_bytes, const at::Tensor& size_bytes,
                      int64_t seed) {
  check_buffer(buffer);
  check_vector(offset_bytes, at::kLong, "offset_bytes");
  check_vector(size_bytes, at::kLong, "size_bytes");
  for (const at::Tensor* tensor : {&buffer, &offset_bytes, &size_bytes}) check_cpu(*tensor);
  const int64_t n = offset_bytes.numel(), buffer_bytes = buffer.numel();
  TORCH_CHECK_VALUE(size_bytes.numel() == n, "size_bytes must have as many entries as offset_bytes (", n, "), got ",
                    size_bytes.numel());
  TORCH_CHECK_VALUE(seed >= 0 && seed <= 0xFFFFFFFF, "seed must be a 32-bit CRC, got ", seed);
  const at::Tensor offsets = offset_bytes.contiguous(), sizes = size_bytes.contiguous();
  const int64_t* offset = offsets.const_data_ptr<int64_t>();
  const int64_t* size = sizes.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < n; ++i) {
    const bool inside =
        offset[i] >= 0 && size[i] >= 0 && offset[i] <= buffer_bytes && size[i] <= buffer_bytes - offset[i];
    TORCH_CHECK_INDEX(inside, "range ", i, " (offset_bytes ", offset[i], ", size_bytes ", size[i],
                      ") does not lie inside the buffer of ", buffer_bytes, " bytes");
  }
  at::Tensor crcs = at::empty({n}, offset_bytes.options());
  int64_t* crc = crcs.mutable_data_ptr<int64_t>();
  const uint8_t* bytes = buffer.const_data_ptr<uint8_t>();
  for (int64_t i = 0; i < n; ++i) {
    crc[i] = espnx::crc32c(static_cast<uint32_t>(seed), bytes + offset[i], static_cast<size_t>(size[i]));
  }
  return crcs;
}

// What the schema alone cannot say of attention's tensors.
void check_attention(const at::Tensor& query, const at::Tensor& buffer, const at::Tensor& block_offset_bytes,
                     const at::Tensor& n_rows, const std::optional<at::Tensor>& visible,
                     const std::optional<at::Tensor>& last_position) {
  const at::ScalarType dtype = query.scalar_type();
  TORCH_CHECK_VALUE(query.dim() == 4 && (dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16),
                    "query must be a float32, float16 or bfloat16 tensor [B, H, q, d], got ", query.dim(), "-D ",
                    dtype);
  check_buffer(buffer);
  check_vector(n_rows, at::kLong, "n_rows");
  TORCH_CHECK_VALUE(block_offset_bytes.dim() == 3 && block_offset_bytes.scalar_type() == at::kLong,
                    "block_offset_bytes must be an int64 tensor [B, n_kv, n_blocks], got ", block_offset_bytes.dim(),
                    "-D ", block_offset_bytes.scalar_type());
  for (const at::Tensor* tensor : {&query, &buffer, &block_offset_bytes, &n_rows}) check_cpu(*tensor);
  const int64_t n = query.size(0), n_kv = block_offset_bytes.size(1);
  TORCH_CHECK_VALUE(block_offset_bytes.size(0) == n && n_rows.numel() == n,
                    "block_offset_bytes and n_rows must have the query's batch size ", n);
  TORCH_CHECK_VALUE(n_kv > 0 && query.size(1) % n_kv == 0, "query heads (", query.size(1),
                    ") must be a multiple of the KV heads (", n_kv, ")");
  if (visible.has_value()) {
    check_cpu(*visible);
    TORCH_CHECK_VALUE(visible->dim() == 2 && visible->scalar_type() == at::kByte && visible->size(0) == n,
                      "visible must be a uint8 tensor [B, rows]");
  }
  if (last_position.has_value()) {
    check_cpu(*last_position);
    TORCH_CHECK_VALUE(last_position->dim() == 2 && last_position->scalar_type() == at::kLong &&
                          last_position->size(0) == n && last_position->size(1) == query.size(2),
                      "last_position must be an int64 tensor [B, q]");
  }
}

void check_attention_rows(const espnx::AttentionBatch& batch) {
  for (const int64_t dim : {batch.d, batch.dv}) {
    TORCH_CHECK_VALUE(dim % 8 == 0 && dim >= 8 && dim <= espnx::kMaxHeadDim,
                      "d and dv must be multiples of 8 from 8 to ", espnx::kMaxHeadDim, ", got ", dim);
  }
  TORCH_CHECK_VALUE(batch.block_rows >= 1 && batch.block_rows <= 1 << 20, "block_rows must be 1 to ", 1 << 20, ", got ",
                    batch.block_rows);
  TORCH_CHECK_VALUE(!batch.is_x || batch.format != espnx::RowFormat::int8, "X rows (dv 0) have no int8 format");
  for (int64_t i = 0; i < batch.n; ++i) {
    const int64_t rows = batch.n_rows[i];
    TORCH_CHECK_VALUE(rows >= 0 && rows <= batch.n_blocks * batch.block_rows, "n_rows of sequence ", i,
                      " must be 0 to ", batch.n_blocks * batch.block_rows, ", what its blocks hold, got ", rows);
    TORCH_CHECK_VALUE(batch.visible == nullptr || rows <= batch.visible_stride, "visible has ", batch.visible_stride,
                      " entries a sequence, but sequence ", i, " has ", rows, " rows");
  }
  const int64_t outside = espnx::find_block_outside(batch);
  TORCH_CHECK_INDEX(outside < 0, "block ", outside, " (offset_bytes ", batch.block_offset_bytes[outside], ", ",
                    espnx::attention_block_bytes(batch), " bytes) does not lie inside the buffer of ",
                    batch.buffer_bytes, " bytes");
}

std::tuple<at::Tensor, at::Tensor> attention_cpu(const at::Tensor& query, const at::Tensor& buffer,
                                                 const at::Tensor& block_offset_bytes, const at::Tensor& n_rows,
                                                 int64_t block_rows, const std::string& format, double scale,
                                                 int64_t dv, const std::optional<at::Tensor>& visible,
                                                 const std::optional<at::Tensor>& last_position, int64_t threads) {
  check_attention(query, buffer, block_offset_bytes, n_rows, visible, last_position);
  espnx::RowFormat row;
  TORCH_CHECK_VALUE(espnx::parse_row_format(format.c_str(), &row), "unknown row format '", format, "'");
  TORCH_CHECK_VALUE(threads >= 0, "threads must be 0 (choose) or more, got ", threads);
  const int64_t n = query.size(0), heads = query.size(1), q_len = query.size(2), d = query.size(3);
  const int64_t n_kv = block_offset_bytes.size(1);
  const at::Tensor q = query.to(at::kFloat).mul(scale).contiguous(), offsets = block_offset_bytes.contiguous();
  const at::Tensor counts = n_rows.contiguous();
  const at::Tensor seen = visible.has_value() ? visible->contiguous() : at::Tensor();
  const at::Tensor last = last_position.has_value() ? last_position->contiguous() : at::Tensor();
  const espnx::AttentionBatch batch{q.const_data_ptr<float>(),
                                    n,
                                    n_kv,
                                    heads / n_kv * q_len,
                                    d,
                                    dv == 0 ? d : dv,
                                    q_len,
                                    buffer.const_data_ptr<uint8_t>(),
                                    buffer.numel(),
                                    offsets.const_data_ptr<int64_t>(),
                                    offsets.size(2),
                                    counts.const_data_ptr<int64_t>(),
                                    block_rows,
                                    row,
                                    dv == 0,
                                    seen.defined() ? seen.const_data_ptr<uint8_t>() : nullptr,
                                    seen.defined() ? seen.size(1) : 0,
                                    last.defined() ? last.const_data_ptr<int64_t>() : nullptr};
  check_attention_rows(batch);
  at::Tensor o = at::empty({n, heads, q_len, batch.dv}, q.options()), lse = at::empty({n, heads, q_len}, q.options());
  const int max_threads = static_cast<int>(threads > 0 ? std::min<int64_t>(threads, 1024) : at::get_num_threads());
  espnx::attend_batch(batch, max_threads, o.mutable_data_ptr<float>(), lse.mutable_data_ptr<float>());
  return {o, lse};
}

int64_t cpu_level() { return static_cast<int64_t>(espnx::cpu_level()); }

int64_t set_cpu_level(int64_t level) {
  TORCH_CHECK_VALUE(espnx::set_cpu_level(static_cast<int>(std::max<int64_t>(std::min<int64_t>(level, 99), -1))),
                    "this processor's best level is ", static_cast<int64_t>(espnx::best_cpu_level()),
                    " (0 portable, 1 AVX2, 2 AVX-512, 3 VNNI, 4 AMX), got ", level);
  return cpu_level();
}

}  // namespace

TORCH_LIBRARY(espnx, m) {
  // threads: 0 lets the op choose, at most torch's own number; CUDA ignores it.
  m.def(
      "maxsim(Tensor query, Tensor buffer, Tensor offset_bytes, Tensor n_tokens, str format, int threads=0, "
      "Tensor? centroids=None, Tensor? bucket_weights=None) -> Tensor");
  m.def("crc32c(Tensor buffer, Tensor offset_bytes, Tensor size_bytes, int seed=0) -> Tensor");
  // dv 0: blocks hold X rows, which stand for K and V at once.
  m.def(
      "attention(Tensor query, Tensor buffer, Tensor block_offset_bytes, Tensor n_rows, int block_rows, str format, "
      "float scale, int dv, Tensor? visible=None, Tensor? last_position=None, int threads=0) -> (Tensor, Tensor)");
  // For tests and benchmarks: the instruction set in force in this process (0 portable, 1 AVX2, 2 AVX-512, 3 VNNI, 4
  // AMX; -1 restores the best).
  m.def("cpu_level() -> int", &cpu_level);
  m.def("set_cpu_level(int level) -> int", &set_cpu_level);
}

TORCH_LIBRARY_IMPL(espnx, CPU, m) {
  m.impl("maxsim", &maxsim_cpu);
  m.impl("crc32c", &crc32c_cpu);
  m.impl("attention", &attention_cpu);
}
