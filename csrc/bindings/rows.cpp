// Stored K/V and X rows in Python: reads that run ahead, and attention on rows as they arrive.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <optional>
#include <tuple>

#include "bindings.hpp"
#include "cpu/aligned.hpp"
#include "cpu/packed/packed.hpp"
#include "cpu/parallel.hpp"
#include "device/draft/page_naming.hpp"
#include "device/row_stream.hpp"

namespace espnx::python {
namespace {

using device::RowStream;

device::RowGeometry to_geometry(const py::dict& d) {
  device::RowGeometry geometry;
  const auto format = d["format"].cast<std::string>();
  if (!espnx::parse_row_format(format.c_str(), &geometry.format))
    invalid("unknown row format '" + format + "'");
  geometry.d = d["d"].cast<int64_t>();
  geometry.dv = d["dv"].cast<int64_t>();
  geometry.is_shared = d["is_shared"].cast<bool>();
  geometry.block_rows = d["block_rows"].cast<int64_t>();
  geometry.block_bytes = d["block_bytes"].cast<int64_t>();
  geometry.k_offset_bytes = d["k_offset_bytes"].cast<int64_t>();
  geometry.v_offset_bytes = d["v_offset_bytes"].cast<int64_t>();
  geometry.k_scale_offset_bytes = d["k_scale_offset_bytes"].cast<int64_t>();
  geometry.v_scale_offset_bytes = d["v_scale_offset_bytes"].cast<int64_t>();
  const int64_t item = espnx::row_item_bytes(geometry.format);
  const int64_t k_end = geometry.k_offset_bytes + geometry.block_rows * geometry.d * item;
  const int64_t v_end = geometry.v_offset_bytes + geometry.block_rows * geometry.dv * item;
  if (geometry.d < 1 || geometry.dv < 1 || geometry.block_rows < 1 ||
      geometry.block_bytes < std::max(k_end, v_end)) {
    invalid("the rows do not fit their block");
  }
  return geometry;
}

// RowSegment as Python says it (SEGMENT_READ of espnx/device/rows/file.py): in place of the pointer
// which of `sums` its checksums lie in, and from where on.
struct SegmentRead {
  int64_t file, offset_bytes, sequence, first_head, head_step, n_heads, n_blocks, n_rows,
      first_position, sums, first_sum;
};
constexpr const char* kSegmentFields[] = {
    "file",     "offset_bytes", "sequence",       "first_head", "head_step", "n_heads",
    "n_blocks", "n_rows",       "first_position", "sums",       "first_sum"};
constexpr const char* kPieceFields[] = {"sequence", "head", "offset_bytes", "n_rows",
                                        "first_position"};
static_assert(sizeof(SegmentRead) == std::size(kSegmentFields) * sizeof(int64_t));
static_assert(sizeof(device::RowPiece) == std::size(kPieceFields) * sizeof(int64_t));

std::vector<device::RowSegment> to_segments(const Tensor& table, const std::vector<Tensor>& sums,
                                            int64_t block_rows) {
  constexpr auto kFields = static_cast<int64_t>(std::size(kSegmentFields));
  const auto* read = contiguous<const SegmentRead>(table, Dtype::int64, "segments", "int64");
  if (table.numel() % kFields != 0) invalid("segments must have 11 numbers for each");
  const int64_t count = table.numel() / kFields;
  std::vector<device::RowSegment> segments;
  segments.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    const SegmentRead& r = read[i];
    if (r.n_heads < 0 || r.n_blocks < 0 || r.n_rows < 0 || r.sequence < 0 || r.first_head < 0 ||
        r.sums < 0 || r.sums >= static_cast<int64_t>(sums.size()) || r.first_sum < 0 ||
        r.first_sum > sums[r.sums].numel() ||
        (r.n_heads > 0 && r.n_blocks > (sums[r.sums].numel() - r.first_sum) / r.n_heads)) {
      invalid("segment " + std::to_string(i) + " names checksums that are not there");
    }
    if (r.n_rows > r.n_blocks * block_rows) invalid("a segment has more rows than its blocks hold");
    segments.push_back({r.file, r.offset_bytes, r.sequence, r.first_head, r.head_step, r.n_heads,
                        r.n_blocks, r.n_rows, r.first_position,
                        sums[r.sums].data<const uint32_t>() + r.first_sum});
  }
  return segments;
}

int64_t push(RowStream& stream, const py::dict& geometry, const Tensor& segments,
             const std::vector<Tensor>& sums, int64_t unit_bytes) {
  free_kept();
  device::RowRequest request;
  for (const Tensor& each : sums) {
    contiguous<const uint32_t>(each, Dtype::uint32, "sums", "uint32");
    request.keeps_alive.push_back(each.keep());
  }
  request.geometry = to_geometry(geometry);
  request.segments = to_segments(segments, sums, request.geometry.block_rows);
  request.unit_bytes = unit_bytes;
  py::gil_scoped_release unlocked;
  return stream.push(std::move(request));
}

const float* floats(const Tensor& tensor, const char* name) {
  return contiguous<const float>(tensor, Dtype::float32, name, "float32");
}

// Rows that wait in memory for their turn to be written: K [sequences, heads, capacity, d], V
// likewise (the same tensor for X).
struct Tail {
  Tensor k, v;
  int64_t skip = 0, n_rows = 0, first_position = 0;  // the rows that count begin after `skip`
  espnx::RowFormat format = espnx::RowFormat::fp32;
};

espnx::RowFormat format_of(Dtype dtype) {
  if (dtype == Dtype::float32) return espnx::RowFormat::fp32;
  if (dtype == Dtype::float16) return espnx::RowFormat::fp16;
  if (dtype == Dtype::bfloat16) return espnx::RowFormat::bf16;
  invalid("rows in memory must be float32, float16 or bfloat16");
}

void check_tail(const Tail& tail, const device::RowQueries& queries) {
  for (const auto& [rows, width] :
       {std::make_pair(tail.k, queries.d), std::make_pair(tail.v, queries.dv)}) {
    if (!rows.is_cpu() || !rows.is_contiguous() || !rows.is_aligned() || rows.dim() != 4 ||
        rows.size(0) != queries.n_sequences || rows.size(1) != queries.n_heads || tail.skip < 0 ||
        tail.n_rows < 0 || tail.skip > rows.size(2) - tail.n_rows || rows.size(3) != width ||
        rows.dtype() != tail.k.dtype()) {
      invalid(
          "rows in memory must be contiguous, aligned [sequences, heads, rows, width] tensors of "
          "one dtype on the CPU");
    }
  }
}

// The queries as they look at some rows in memory.
struct InMemory {
  Tail tail;
  device::RowQueries queries;

  int64_t products() const {
    return queries.n_sequences * queries.n_heads * queries.n * tail.n_rows *
           (queries.d + queries.dv);
  }

  // Folds the rows of (sequence, head) number `group` into its state.
  void attend(int64_t group) const {
    const int64_t item = espnx::row_item_bytes(tail.format), capacity = tail.k.size(2);
    const espnx::AttentionRows rows{
        tail.k.data<const uint8_t>() + (group * capacity + tail.skip) * queries.d * item,
        tail.v.data<const uint8_t>() + (group * tail.v.size(2) + tail.skip) * queries.dv * item,
        tail.n_rows,
        capacity,
        0,
        tail.format,
        0,
        0,
        tail.first_position,
        nullptr};
    const int64_t sequence = group / queries.n_heads, head = group % queries.n_heads;
    device::attend_group(
        queries, sequence, head, rows,
        device::state_of_group(queries, {queries.o, queries.m, queries.l}, sequence, head));
  }
};

// All of them are of the same (sequence, head)s, and go into the same states.
void attend_in_memory(const std::vector<InMemory>& every, int64_t groups, int n_threads) {
  int64_t products = 0;
  for (const InMemory& each : every) products += each.products();
  const int threads = products < (1 << 20) ? 1 : n_threads;
  espnx::parallel_for(groups, 1, threads, [&](int, int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      for (const InMemory& each : every) each.attend(group);
    }
  });
}

const int64_t* positions(const std::optional<Tensor>& tensor, int64_t count, const char* name) {
  if (!tensor) return nullptr;
  const auto* values = contiguous<const int64_t>(*tensor, Dtype::int64, name, "int64");
  if (tensor->numel() != count)
    invalid(std::string(name) + " must have " + std::to_string(count) + " entries");
  return values;
}

// The rows in memory that Python hands over: (k, v, skip, n_rows, first_position).
using TailArguments = std::tuple<Tensor, Tensor, int64_t, int64_t, int64_t>;
// And pages: (k [sequences, heads, rows, d], v, seen uint8 [sequences, heads, rows]).
using PageArguments = std::tuple<Tensor, Tensor, Tensor>;

// What attends.
struct AttendArguments {
  Tensor q;
  int64_t dv = 0;
  std::optional<TailArguments> rows;
  std::optional<Tensor> position, last_position, first_visible, visible;
  int64_t window = 0;
  float soft_cap = 0;
  std::optional<Tensor> slopes;
  int64_t positions = 0;  // of rows beside those, at least
};

device::RowQueries to_queries(const AttendArguments& given) {
  const Tensor& q = given.q;
  if (q.dim() != 4) invalid("q must have four dimensions");
  device::RowQueries queries{};
  queries.q = floats(q, "q");
  queries.n_sequences = q.size(0), queries.n_heads = q.size(1), queries.n = q.size(2);
  queries.d = q.size(3), queries.dv = given.dv;
  queries.position = positions(given.position, queries.n, "position");
  queries.last_position = positions(given.last_position, queries.n, "last_position");
  queries.first_visible = positions(given.first_visible, queries.n_sequences, "first_visible");
  queries.window = given.window, queries.soft_cap = given.soft_cap;
  if ((queries.window != 0 || given.slopes) && !given.position)
    invalid("a window or slopes need position");
  if (queries.window < 0 || !(queries.soft_cap >= 0))
    invalid("window and soft_cap must not be negative");
  if (given.slopes) {
    queries.slopes = floats(*given.slopes, "slopes");
    if (given.slopes->numel() != queries.n_heads * queries.n)
      invalid("slopes must be [KV heads, n]");
  }
  if (given.visible) {
    const Tensor& visible = *given.visible;
    queries.visible = contiguous<const uint8_t>(visible, Dtype::uint8, "visible", "uint8");
    const int64_t tail_end = given.rows ? std::get<3>(*given.rows) + std::get<4>(*given.rows) : 0;
    if (visible.dim() != 2 || visible.size(0) != queries.n_sequences ||
        visible.size(1) < std::max(tail_end, given.positions)) {
      invalid("visible must be [sequences, positions]");
    }
    queries.visible_stride = visible.size(1);
  }
  return queries;
}

Tail to_tail(const TailArguments& given, const device::RowQueries& queries) {
  const auto& [k, v, skip, n_rows, first_position] = given;
  Tail tail{k, v, skip, n_rows, first_position, format_of(k.dtype())};
  check_tail(tail, queries);
  return tail;
}

// Pages whose rows are seen by their own marks, whatever their positions.
InMemory to_pages(const PageArguments& given, const device::RowQueries& queries) {
  const auto& [k, v, seen] = given;
  if (k.dim() != 4) invalid("pages must have four dimensions");
  const int64_t rows = k.size(2), groups = queries.n_sequences * queries.n_heads;
  InMemory pages{to_tail({k, v, 0, rows, 0}, queries), queries};
  device::RowQueries& own = pages.queries;
  own.n_sequences = groups, own.n_heads = 1;
  own.last_position = own.first_visible = own.position = nullptr;
  own.window = 0, own.slopes = nullptr;
  own.visible = contiguous<const uint8_t>(seen, Dtype::uint8, "seen", "uint8");
  own.visible_stride = rows;
  if (seen.numel() != groups * rows) invalid("seen must be [sequences, heads, rows]");
  return pages;
}

// Attention of q [sequences, KV heads, n, d] over the rows of `ticket` (no stream: none), those in
// memory, and pages. Returns (o float32 [sequences, KV heads, n, dv], normalised; lse float32
// [sequences, KV heads, n]).
std::tuple<NewTensor, NewTensor> attend(RowStream* stream, int64_t ticket,
                                        const AttendArguments& given,
                                        const std::optional<PageArguments>& pages, int threads) {
  if (threads < 1) invalid("threads must be 1 or more");
  device::RowQueries queries = to_queries(given);
  const int64_t n = queries.n, groups = queries.n_sequences * queries.n_heads;
  if (queries.dv < 0 || queries.dv > espnx::kMaxHeadDim)
    invalid("dv must be 0 to " + std::to_string(espnx::kMaxHeadDim));
  NewFloats o({queries.n_sequences, queries.n_heads, n, queries.dv}),
      lse({queries.n_sequences, queries.n_heads, n});
  espnx::AlignedFloats m(groups * n), l(groups * n);
  queries.o = o.data(), queries.m = m.data(), queries.l = l.data();
  std::vector<InMemory> in_memory;
  if (given.rows) in_memory.push_back({to_tail(*given.rows, queries), queries});
  if (pages) in_memory.push_back(to_pages(*pages, queries));
  // Before and after there are no rows to share out, but sums: a thread for less than a MiB of them
  // takes longer to start than they do.
  constexpr int64_t kWorthAThread = 1 << 18;
  const bool is_small = groups * n * (queries.dv + 2) < kWorthAThread;
  const int sharing = is_small ? 1 : static_cast<int>(std::clamp<int64_t>(groups, 1, threads));
  const int64_t grain = std::max<int64_t>(1, groups / (4 * sharing));
  const auto each_state = [&](const auto& work) {
    espnx::parallel_for(groups, grain, sharing, [&](int, int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) {
        work(device::state_of_group(queries, {queries.o, queries.m, queries.l}, 0, group), group);
      }
    });
  };
  run_interruptibly([&](const std::function<bool()>& interrupted) {
    each_state([&](const espnx::AttentionState& state, int64_t) {
      std::fill_n(state.o, n * queries.dv, 0.0F);
      std::fill_n(state.m, n, -std::numeric_limits<float>::infinity());
      std::fill_n(state.l, n, 0.0F);
    });
    attend_in_memory(in_memory, groups, threads);
    if (stream != nullptr) stream->attend(ticket, queries, threads, interrupted);
    each_state([&](const espnx::AttentionState& state, int64_t group) {
      espnx::finish_attention(state, n, queries.dv, lse.data() + group * n);
    });
  });
  return {o.tensor(), lse.tensor()};
}

// Attention of q [sequences, KV heads, n, d] over uint8 pages [sequences, KV heads, capacity,
// page_bytes], of which the first `n_pages` count, from position 0 on, and over rows in memory: as
// attend().
std::tuple<NewTensor, NewTensor> attend_packed(const Tensor& pages, int64_t n_pages,
                                               AttendArguments given, int threads) {
  if (threads < 1) invalid("threads must be 1 or more");
  given.positions = n_pages * espnx::kPackedRows;
  device::RowQueries queries = to_queries(given);
  const int64_t n = queries.n, groups = queries.n_sequences * queries.n_heads;
  for (const int64_t dim : {queries.d, queries.dv}) {
    if (dim < 8 || dim % 8 != 0 || dim > espnx::kMaxHeadDim)
      invalid("d and dv must be multiples of 8, of 8 to " + std::to_string(espnx::kMaxHeadDim));
  }
  const int64_t page_bytes = espnx::packed_page_bytes(queries.d, queries.dv);
  const auto* memory = contiguous<const uint8_t>(pages, Dtype::uint8, "pages", "uint8");
  if (pages.dim() != 4 || pages.size(0) != queries.n_sequences ||
      pages.size(1) != queries.n_heads || pages.size(3) != page_bytes || n_pages < 0 ||
      n_pages > pages.size(2)) {
    invalid("pages must be [sequences, KV heads, pages, " + std::to_string(page_bytes) + "]");
  }
  NewFloats o({queries.n_sequences, queries.n_heads, n, queries.dv}),
      lse({queries.n_sequences, queries.n_heads, n});
  espnx::AlignedFloats m(groups * n), l(groups * n);
  o.fill(0), l.fill(0), m.fill(-std::numeric_limits<float>::infinity());
  queries.o = o.data(), queries.m = m.data(), queries.l = l.data();
  constexpr int64_t kPages = 4;  // decoded at a time: what attention folds in at once
  const int64_t rows = kPages * espnx::kPackedRows, width = queries.d + queries.dv;
  std::optional<InMemory> in_memory;
  if (given.rows) in_memory = InMemory{to_tail(*given.rows, queries), queries};
  const int64_t work = groups * n_pages * espnx::kPackedRows * (n + 2) * width +
                       (in_memory ? in_memory->products() : 0);
  const int n_threads = work < (1 << 20) ? 1 : threads;
  espnx::AlignedFloats decoded(n_threads * rows * width);
  const int64_t capacity_bytes = pages.size(2) * page_bytes;
  const auto attend_some = [&](int thread, int64_t begin, int64_t end) {
    float* k = decoded.data() + thread * rows * width;
    float* v = k + rows * queries.d;
    for (int64_t group = begin; group < end; ++group) {
      const uint8_t* own = memory + group * capacity_bytes;
      const int64_t sequence = group / queries.n_heads, head = group % queries.n_heads;
      const auto state =
          device::state_of_group(queries, {queries.o, queries.m, queries.l}, sequence, head);
      for (int64_t page = 0; page < n_pages; page += kPages) {
        const int64_t count = std::min(kPages, n_pages - page);
        for (int64_t i = 0; i < count; ++i) {
          const int64_t row = i * espnx::kPackedRows;
          espnx::unpack_page(own + (page + i) * page_bytes, queries.d, queries.dv,
                             k + row * queries.d, v + row * queries.dv);
        }
        const espnx::AttentionRows some{reinterpret_cast<const uint8_t*>(k),
                                        reinterpret_cast<const uint8_t*>(v),
                                        count * espnx::kPackedRows,
                                        rows,
                                        0,
                                        espnx::RowFormat::fp32,
                                        0,
                                        0,
                                        page * espnx::kPackedRows,
                                        nullptr};
        device::attend_group(queries, sequence, head, some, state);
      }
      if (in_memory) in_memory->attend(group);
      espnx::finish_attention(state, n, queries.dv, lse.data() + group * n);
    }
  };
  {
    py::gil_scoped_release unlocked;
    espnx::parallel_for(groups, 1, n_threads, attend_some);
  }
  return {o.tensor(), lse.tensor()};
}

// Packs rows k [pages * kPackedRows, d] and v [..., dv], float32, into uint8 pages [pages,
// page_bytes], on at most so many threads.
void pack_pages(const Tensor& k, const Tensor& v, const Tensor& pages, int threads) {
  if (threads < 1) invalid("threads must be 1 or more");
  const auto* from_k = contiguous<const float>(k, Dtype::float32, "k", "float32");
  const auto* from_v = contiguous<const float>(v, Dtype::float32, "v", "float32");
  auto* to = contiguous<uint8_t>(pages, Dtype::uint8, "pages", "uint8");
  if (k.dim() != 2 || v.dim() != 2 || pages.dim() != 2) invalid("k, v and pages must be matrices");
  const int64_t n_pages = pages.size(0), d = k.size(1), dv = v.size(1);
  const int64_t page_bytes = espnx::packed_page_bytes(d, dv);
  if (d < 1 || dv < 1 || k.size(0) != n_pages * espnx::kPackedRows || v.size(0) != k.size(0) ||
      pages.size(1) != page_bytes) {
    invalid("k and v must have " + std::to_string(espnx::kPackedRows) +
            " rows a page, and pages as many bytes as they take");
  }
  constexpr int64_t kPagesOfThread = 8;  // fewer are not worth a thread
  py::gil_scoped_release unlocked;
  espnx::parallel_for(n_pages, kPagesOfThread, threads, [&](int, int64_t begin, int64_t end) {
    for (int64_t page = begin; page < end; ++page) {
      const int64_t row = page * espnx::kPackedRows;
      espnx::pack_page(from_k + row * d, from_v + row * dv, d, dv, to + page * page_bytes);
    }
  });
}

// Which of a tier's sequences each of the queries' is, and the memory of the tier's pages.
struct PageTensors {
  Tensor k, v, seen, lse, stays, number, place;
  int64_t end = 0;
};

// A PageNaming and all that it looks at.
class Naming {
 public:
  Naming(const AttendArguments& given, const py::dict& geometry, const PageTensors& tier,
         int threads)
      : queries_(to_queries(given)) {
    const device::RowGeometry of_rows = to_geometry(geometry);
    if (threads < 1) invalid("threads must be 1 or more");
    if (of_rows.is_shared || of_rows.d != queries_.d || of_rows.dv != queries_.dv ||
        queries_.dv > espnx::kMaxHeadDim) {
      invalid("the queries do not fit the rows");
    }
    device::PageSlots slots{};
    slots.slots = tier.number.dim() == 3 ? tier.number.size(2) : 0;
    slots.format = format_of(tier.k.dtype());
    if (of_rows.format != slots.format && of_rows.format != espnx::RowFormat::int8)
      invalid("pages must be of the dtype of the stored rows");
    const int64_t sequences = tier.number.dim() == 3 ? tier.number.size(0) : 0;
    const auto check = [&](const Tensor& tensor, std::vector<int64_t> behind, const char* name) {
      std::vector<int64_t> shape{sequences, queries_.n_heads, slots.slots};
      shape.insert(shape.end(), behind.begin(), behind.end());
      bool fits = tensor.dim() == static_cast<int64_t>(shape.size()) && tensor.is_cpu() &&
                  tensor.is_contiguous() && tensor.is_aligned();
      for (size_t i = 0; fits && i < shape.size(); ++i)
        fits = tensor.size(static_cast<int64_t>(i)) == shape[i];
      if (!fits) invalid(std::string("the tier's ") + name + " has another shape");
      kept_.push_back(tensor.keep());
    };
    check(tier.k, {device::kPageRows, queries_.d}, "k");
    check(tier.v, {device::kPageRows, queries_.dv}, "v");
    check(tier.seen, {device::kPageRows}, "seen");
    check(tier.lse, {queries_.n}, "lse");
    check(tier.stays, {}, "stays");
    check(tier.number, {}, "number");
    if (tier.v.dtype() != tier.k.dtype()) invalid("the tier's k and v are of two dtypes");
    slots.k = tier.k.data<uint8_t>(), slots.v = tier.v.data<uint8_t>();
    slots.seen = contiguous<uint8_t>(tier.seen, Dtype::uint8, "seen", "uint8");
    slots.lse = contiguous<float>(tier.lse, Dtype::float32, "lse", "float32");
    slots.stays = contiguous<uint8_t>(tier.stays, Dtype::uint8, "stays", "uint8");
    slots.number = contiguous<int64_t>(tier.number, Dtype::int64, "number", "int64");
    const int64_t* place = positions(tier.place, queries_.n_sequences, "place");
    for (int64_t i = 0; i < queries_.n_sequences; ++i) {
      if (place[i] < -1 || place[i] >= sequences) invalid("a place that the tier does not have");
    }
    for (const std::optional<Tensor>& each :
         {std::optional<Tensor>(given.q), given.position, given.last_position, given.first_visible,
          given.visible, given.slopes}) {
      if (each) kept_.push_back(each->keep());
    }
    naming_ =
        std::make_unique<device::PageNaming>(queries_, of_rows, slots, place, tier.end, threads);
  }

  // Rows as a device shows them; `pieces`: int64 [pieces, 5], the fields of RowPiece.
  void see(const Tensor& memory, const Tensor& pieces) {
    constexpr auto kFields = static_cast<int64_t>(std::size(kPieceFields));
    const auto* bytes = contiguous<const char>(memory, Dtype::uint8, "memory", "uint8");
    const auto* table = contiguous<const device::RowPiece>(pieces, Dtype::int64, "pieces", "int64");
    if (pieces.numel() % kFields != 0) invalid("pieces must have 5 numbers for each");
    const int64_t size_bytes = memory.numel(), count = pieces.numel() / kFields;
    py::gil_scoped_release unlocked;
    naming_->see(table, count, bytes, size_bytes);
  }

  std::tuple<NewTensor, NewTensor> finish() {
    NewFloats o({queries_.n_sequences, queries_.n_heads, queries_.n, queries_.dv}),
        lse({queries_.n_sequences, queries_.n_heads, queries_.n});
    {
      py::gil_scoped_release unlocked;
      naming_->finish(o.data(), lse.data());
    }
    return {o.tensor(), lse.tensor()};
  }

  device::PageNaming& naming() { return *naming_; }

 private:
  device::RowQueries queries_;
  std::vector<std::shared_ptr<void>> kept_;
  std::unique_ptr<device::PageNaming> naming_;
};

// Shows all reads of the ticket to `naming`, in its threads.
void name_pages(RowStream& stream, int64_t ticket, Naming& naming) {
  naming.naming().begin_reads();
  run_interruptibly([&](const std::function<bool()>& interrupted) {
    stream.visit(
        ticket,
        [&](const device::RowPlan& plan, const device::RowUnit& unit, const char* memory,
            int thread, const std::function<bool()>& is_over) {
          const auto pieces = plan.pieces(unit);
          naming.naming().see(pieces.begin(), pieces.count, memory, unit.size_bytes, thread,
                              &unit - plan.units.data(), is_over);
        },
        naming.naming().n_threads(), interrupted);
  });
}

NewTensor piece_table(const device::RowPlan& plan, const device::RowUnit& unit) {
  const auto pieces = plan.pieces(unit);
  constexpr auto kFields = static_cast<int64_t>(std::size(kPieceFields));
  const auto table = std::make_shared<std::vector<int64_t>>(pieces.count * kFields);
  std::memcpy(table->data(), pieces.begin(), pieces.count * sizeof(device::RowPiece));
  return {table->data(), Dtype::int64, {pieces.count, kFields}, table};
}

py::tuple names(const char* const* begin, const char* const* end) {
  py::list found;
  for (; begin != end; ++begin) found.append(*begin);
  return found;
}

// Calls see(uint8 [bytes], int64 [pieces, 5]: the fields of RowPiece) for each read. The bytes are
// not valid any more when it returns.
void visit(RowStream& stream, int64_t ticket, const py::function& see) {
  run_interruptibly([&](const std::function<bool()>& interrupted) {
    stream.visit(
        ticket,
        [&](const device::RowPlan& plan, const device::RowUnit& unit, const char* memory, int,
            const std::function<bool()>&) {
          py::gil_scoped_acquire locked;
          see(NewTensor(memory, Dtype::uint8, {unit.size_bytes}, nullptr), piece_table(plan, unit));
        },
        1, interrupted);
  });
}

}  // namespace

void bind_rows(py::module_& m) {
  py::class_<Naming>(m, "PageNaming")
      .def(py::init([](const Tensor& q, int64_t dv, const std::optional<Tensor>& position,
                       const std::optional<Tensor>& last_position,
                       const std::optional<Tensor>& first_visible,
                       const std::optional<Tensor>& visible, int64_t window, float soft_cap,
                       const std::optional<Tensor>& slopes, const py::dict& geometry,
                       const Tensor& k, const Tensor& v, const Tensor& seen, const Tensor& lse,
                       const Tensor& stays, const Tensor& number, const Tensor& place, int64_t end,
                       int threads) {
             free_kept();
             return std::make_unique<Naming>(
                 AttendArguments{q, dv, std::nullopt, position, last_position, first_visible,
                                 visible, window, soft_cap, slopes, end},
                 geometry, PageTensors{k, v, seen, lse, stays, number, place, end}, threads);
           }),
           py::kw_only(), py::arg("q"), py::arg("dv"), py::arg("position") = py::none(),
           py::arg("last_position") = py::none(), py::arg("first_visible") = py::none(),
           py::arg("visible") = py::none(), py::arg("window") = 0, py::arg("soft_cap") = 0.0F,
           py::arg("slopes") = py::none(), py::arg("geometry"), py::arg("k"), py::arg("v"),
           py::arg("seen"), py::arg("lse"), py::arg("stays"), py::arg("number"), py::arg("place"),
           py::arg("end"), py::arg("threads"))
      .def("see", &Naming::see)
      .def("finish", &Naming::finish);
  py::class_<RowStream>(m, "RowStream")
      .def(py::init([](const std::shared_ptr<io::Engine>& engine, int64_t window_bytes,
                       double deadline_s) {
             if (window_bytes < 1 || !(deadline_s > 0))
               invalid("window_bytes and deadline_s must be positive");
             return std::make_unique<RowStream>(engine, window_bytes, deadline_s);
           }),
           py::arg("engine"), py::arg("window_bytes"), py::arg("deadline_s"))
      .def("push", &push)
      .def("front", &RowStream::front, py::call_guard<py::gil_scoped_release>())
      .def("clear", &RowStream::clear, py::call_guard<py::gil_scoped_release>())
      .def("reach", &RowStream::reach, py::call_guard<py::gil_scoped_release>())
      .def("visit", &visit)
      .def("name_pages", &name_pages)
      .def("stats", [](RowStream& stream) {
        const RowStream::Stats stats = stream.stats();
        py::dict found;
        found["bytes_asked"] = stats.bytes_asked;
        found["bytes_moved"] = stats.bytes_moved;
        found["read_requests"] = stats.read_requests;
        found["waiting_s"] = stats.waiting_s;
        found["computing_s"] = stats.computing_s;
        found["ahead_bytes"] = stats.ahead_bytes;
        found["most_ahead_bytes"] = stats.most_ahead_bytes;
        return found;
      });
  m.def("pack_pages", &pack_pages, py::arg("k"), py::arg("v"), py::arg("pages"),
        py::arg("threads"));
  m.def(
      "attend_packed",
      [](const Tensor& pages, int64_t n_pages, const Tensor& q, int64_t dv,
         const std::optional<TailArguments>& rows, const std::optional<Tensor>& position,
         const std::optional<Tensor>& last_position, const std::optional<Tensor>& first_visible,
         const std::optional<Tensor>& visible, int64_t window, float soft_cap,
         const std::optional<Tensor>& slopes, int threads) {
        return attend_packed(pages, n_pages,
                             {q, dv, rows, position, last_position, first_visible, visible, window,
                              soft_cap, slopes, 0},
                             threads);
      },
      py::arg("pages"), py::arg("n_pages"), py::kw_only(), py::arg("q"), py::arg("dv"),
      py::arg("rows") = py::none(), py::arg("position") = py::none(),
      py::arg("last_position") = py::none(), py::arg("first_visible") = py::none(),
      py::arg("visible") = py::none(), py::arg("window") = 0, py::arg("soft_cap") = 0.0F,
      py::arg("slopes") = py::none(), py::arg("threads"));
  m.attr("ROW_SEGMENT_FIELDS") = names(std::begin(kSegmentFields), std::end(kSegmentFields));
  m.attr("ROW_PIECE_FIELDS") = names(std::begin(kPieceFields), std::end(kPieceFields));
  m.def(
      "attend_rows",
      [](RowStream* stream, int64_t ticket, const Tensor& q, int64_t dv,
         const std::optional<TailArguments>& rows, const std::optional<Tensor>& position,
         const std::optional<Tensor>& last_position, const std::optional<Tensor>& first_visible,
         const std::optional<Tensor>& visible, int64_t window, float soft_cap,
         const std::optional<Tensor>& slopes, const std::optional<PageArguments>& pages,
         int threads) {
        return attend(stream, ticket,
                      {q, dv, rows, position, last_position, first_visible, visible, window,
                       soft_cap, slopes, 0},
                      pages, threads);
      },
      py::arg("stream").none(true), py::arg("ticket"), py::kw_only(), py::arg("q"), py::arg("dv"),
      py::arg("rows") = py::none(), py::arg("position") = py::none(),
      py::arg("last_position") = py::none(), py::arg("first_visible") = py::none(),
      py::arg("visible") = py::none(), py::arg("window") = 0, py::arg("soft_cap") = 0.0F,
      py::arg("slopes") = py::none(), py::arg("pages") = py::none(), py::arg("threads"));
}

}  // namespace espnx::python
