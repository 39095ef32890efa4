// Graphs of vectors in Python: building one in memory, and searching one on storage.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>

#include "bindings.hpp"
#include "graph/build/pack.hpp"
#include "graph/build/vamana.hpp"
#include "graph/search.hpp"

namespace espnx::python {
namespace {

using graph::GraphSearcher;
using graph::GraphView;
using graph::Vamana;

VectorFormat to_format(const std::string& name) {
  const int number = number_of(kVectorFormatNames, name.c_str());
  if (number < 0) invalid("unknown vector format '" + name + "'");
  return static_cast<VectorFormat>(number);
}

Metric to_metric(const std::string& name) {
  const int number = number_of(kMetricNames, name.c_str());
  if (number < 0) invalid("unknown metric '" + name + "'");
  return static_cast<Metric>(number);
}

// Rows of `dim` values of a format: [n, dim]; int8 comes as uint8 here.
const uint8_t* rows_of(const Tensor& tensor, VectorFormat format, int64_t dim, const char* name) {
  const Dtype dtype = format == VectorFormat::kFp32   ? Dtype::float32
                      : format == VectorFormat::kFp16 ? Dtype::float16
                      : format == VectorFormat::kBf16 ? Dtype::bfloat16
                                                      : Dtype::uint8;
  const auto* data =
      contiguous<const uint8_t>(tensor, dtype, name, kVectorFormatNames[static_cast<int>(format)]);
  if (tensor.dim() != 2 || tensor.size(1) != dim) invalid(std::string(name) + " must be [n, dim]");
  return data;
}

// A graph that is being built; keeps its vectors.
class PyVamana {
 public:
  PyVamana(const Tensor& vectors, const std::string& format, int64_t degree, int64_t list_size,
           float alpha, int passes, bool saturate, int threads, uint64_t seed) {
    table_.format = to_format(format);
    if (vectors.dim() != 2) invalid("vectors must be [n, dim]");
    table_.n = vectors.size(0), table_.dim = vectors.size(1);
    table_.data = rows_of(vectors, table_.format, table_.dim, "vectors");
    if (table_.n >= UINT32_MAX || table_.dim < 1 || table_.dim > kMaxVectorDim || degree < 1 ||
        degree > 1024 || list_size < 1 || !(alpha >= 1) || !(alpha < 16) || passes < 1 ||
        threads < 1) {
      invalid("options of a graph are out of range");
    }
    keeps_ = vectors.keep();
    graph::VamanaOptions options;
    options.degree = degree, options.list_size = list_size, options.alpha = alpha,
    options.passes = passes;
    options.saturate = saturate, options.threads = threads, options.seed = seed;
    degree_ = degree;
    py::gil_scoped_release unlocked;
    graph_ = std::make_unique<Vamana>(table_, options);
  }
  ~PyVamana() {
    graph_.reset();
    keeps_.reset();
    free_kept();
  }

  // A graph that is there already: neighbours uint32 [n, R], of which each node has the first
  // counts[i], int64 [n].
  static std::unique_ptr<PyVamana> from_edges(const Tensor& vectors, const std::string& format,
                                              const Tensor& neighbours, const Tensor& counts,
                                              int64_t medoid, int64_t list_size) {
    const auto* near =
        contiguous<const uint32_t>(neighbours, Dtype::uint32, "neighbours", "uint32");
    const auto* many = contiguous<const int64_t>(counts, Dtype::int64, "counts", "int64");
    if (neighbours.dim() != 2) invalid("neighbours must be [n, degree]");
    const int64_t n = neighbours.size(0), degree = neighbours.size(1);
    auto made = std::make_unique<PyVamana>(vectors, format, degree, list_size, 1.2f, 1, true, 1, 0);
    if (made->table_.n != n || counts.dim() != 1 || counts.size(0) != n || medoid < 0 ||
        medoid >= std::max<int64_t>(n, 1)) {
      invalid("neighbours, counts and the medoid must be of the vectors");
    }
    for (int64_t i = 0; i < n; ++i) {
      if (many[i] < 0 || many[i] > degree)
        invalid("a node has more neighbours than there is room for");
      for (int64_t j = 0; j < many[i]; ++j) {
        if (near[i * degree + j] >= n) invalid("a neighbour is no node");
      }
    }
    py::gil_scoped_release unlocked;
    made->graph_->set_edges(near, many, static_cast<uint32_t>(medoid));
    return made;
  }

  // `progress(done, total)` may raise, which ends the build.
  void build(const py::function& progress) {
    std::exception_ptr raised;
    {
      py::gil_scoped_release unlocked;
      graph_->build([&](int64_t done, int64_t total) {
        py::gil_scoped_acquire locked;
        try {
          progress(done, total);
          if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        } catch (...) {
          raised = std::current_exception();
        }
        return raised == nullptr;
      });
    }
    if (raised) std::rethrow_exception(raised);
  }

  int64_t connect(const Tensor& entries) {
    std::vector<uint32_t> nodes;
    for (const int64_t entry : to_vector(entries, "entries", -1)) {
      if (entry < 0 || entry >= table_.n) invalid("an entry point is no node");
      nodes.push_back(static_cast<uint32_t>(entry));
    }
    if (nodes.empty() && table_.n > 0) invalid("a graph needs an entry point");
    py::gil_scoped_release unlocked;
    return graph_->connect(nodes);
  }

  // uint8 [n]
  NewTensor leading_to(int64_t node) const {
    if (node < 0 || node >= table_.n) invalid("no such node");
    std::vector<uint8_t> leads(table_.n);
    {
      py::gil_scoped_release unlocked;
      const auto found = graph_->leading_to(static_cast<uint32_t>(node));
      std::copy(found.begin(), found.end(), leads.begin());
    }
    return NewTensor::of(std::move(leads), Dtype::uint8);
  }

  // (neighbours uint32 [n, R], 0 behind the last; how many int64 [n])
  std::pair<NewTensor, NewTensor> edges() const {
    std::vector<uint32_t> neighbours(table_.n * degree_);
    std::vector<int64_t> counts(table_.n);
    {
      py::gil_scoped_release unlocked;
      for (int64_t i = 0; i < table_.n; ++i) {
        counts[i] = graph_->degree_of(i);
        std::copy_n(graph_->neighbours_of(i), counts[i], neighbours.begin() + i * degree_);
      }
    }
    auto owner = std::make_shared<std::vector<uint32_t>>(std::move(neighbours));
    return {NewTensor(owner->data(), Dtype::uint32, {table_.n, degree_}, owner),
            to_tensor(std::move(counts))};
  }

  NewTensor pack(int64_t nodes_per_page) const {
    if (nodes_per_page < 1) invalid("a page must hold a node");
    std::vector<int64_t> order;
    {
      py::gil_scoped_release unlocked;
      const auto packed = graph::pack_nodes(*graph_, table_, nodes_per_page);
      order.assign(packed.begin(), packed.end());
    }
    return to_tensor(std::move(order));
  }

  int64_t medoid() const { return graph_->medoid(); }

 private:
  graph::VectorTable table_{};
  int64_t degree_ = 0;
  std::shared_ptr<void> keeps_;
  std::unique_ptr<Vamana> graph_;
};

// int64 [m, degree]: which of its candidates, int64 [m, p], each node gets, -1 behind the last.
NewTensor prune_candidates(const Tensor& targets, const Tensor& candidates, const Tensor& vectors,
                           int64_t degree, float alpha, int threads) {
  if (vectors.dim() != 2 || targets.dim() != 2 || candidates.dim() != 2)
    invalid("targets and vectors must be [n, dim], candidates [n, p]");
  const int64_t m = targets.size(0), n = vectors.size(0), dim = vectors.size(1);
  const int64_t width = candidates.size(1);
  constexpr VectorFormat kFormat = VectorFormat::kFp32;
  const graph::VectorTable to{rows_of(targets, kFormat, dim, "targets"), m, dim, kFormat},
      from{rows_of(vectors, kFormat, dim, "vectors"), n, dim, kFormat};
  const auto* rows = contiguous<const int64_t>(candidates, Dtype::int64, "candidates", "int64");
  if (candidates.size(0) != m || n >= UINT32_MAX || dim < 1 || dim > kMaxVectorDim || degree < 1 ||
      degree > 65535 || !(alpha >= 1) || !(alpha < 16) || threads < 1) {
    invalid("candidates of each target, a degree, alpha of 1 to 16, and threads are needed");
  }
  for (int64_t i = 0; i < m * width; ++i) {
    if (rows[i] >= n) invalid("a candidate is no row of the vectors");
  }
  std::vector<int64_t> neighbours(m * degree);
  {
    py::gil_scoped_release unlocked;
    graph::prune_all(to, rows, width, from, {degree, alpha, true}, threads, neighbours.data());
  }
  auto owner = std::make_shared<std::vector<int64_t>>(std::move(neighbours));
  return {owner->data(), Dtype::int64, {m, degree}, owner};
}

// Entry points of each part, from begin[p] to begin[p + 1] - 1, and the code of each.
std::pair<std::vector<uint32_t>, std::vector<uint8_t>> to_entries(
    const Tensor& entries, const Tensor& codes, const std::vector<int64_t>& begin,
    const std::vector<graph::Part>& parts, const graph::PageLayout& layout) {
  const std::vector<int64_t> given = to_vector(entries, "entries", -1);
  if (begin.size() != parts.size() + 1 || begin.front() != 0 ||
      begin.back() != static_cast<int64_t>(given.size()) ||
      !std::is_sorted(begin.begin(), begin.end())) {
    invalid("entry points must be those of each part");
  }
  std::vector<uint32_t> nodes;
  for (size_t part = 0; part < parts.size(); ++part) {
    for (int64_t i = begin[part]; i < begin[part + 1]; ++i) {
      if (given[i] < 0 || given[i] >= parts[part].n) invalid("an entry point is no node");
      nodes.push_back(static_cast<uint32_t>(given[i]));
    }
  }
  const auto* near = contiguous<const uint8_t>(codes, Dtype::uint8, "entry_codes", "uint8");
  if (codes.numel() != static_cast<int64_t>(nodes.size()) * layout.code_bytes)
    invalid("a code for each entry");
  return {std::move(nodes), {near, near + codes.numel()}};
}

// A search under way, and the memory that it reads from and writes to.
class PyGraphSearch {
 public:
  PyGraphSearch(std::shared_ptr<GraphSearcher> searcher, const Tensor& queries,
                const Tensor& queries_f32, int64_t k, int64_t list_size, int64_t far_list_size,
                int64_t beam_width, float stop_beyond, const std::optional<py::dict>& filter,
                const std::optional<Tensor>& absent,
                const std::optional<std::pair<Tensor, Tensor>>& parts, double deadline_s)
      : searcher_(std::move(searcher)) {
    const graph::PageLayout& layout = searcher_->view().layout;
    request_.queries =
        rows_of(queries, is_whole(layout.format) ? layout.format : VectorFormat::kFp32, layout.dim,
                "queries");
    request_.n_queries = queries.size(0);
    request_.queries_f32 =
        contiguous<const float>(queries_f32, Dtype::float32, "queries_f32", "float32");
    if (queries_f32.numel() != queries.numel()) invalid("queries_f32 must be the same queries");
    request_.query_bytes = layout.dim * (is_whole(layout.format) ? 1 : 4);
    if (k < 1 || list_size < k || far_list_size < list_size || beam_width < 1 ||
        !(stop_beyond >= 0) || !(deadline_s > 0)) {
      invalid(
          "k must be 1 or more, list_size k or more, far_list_size not less, beam_width 1 or more");
    }
    request_.walk.k = k, request_.walk.list_size = list_size, request_.walk.beam_width = beam_width;
    request_.walk.far_list_size = far_list_size, request_.walk.stop_beyond = stop_beyond;
    request_.deadline_s = deadline_s;
    keeps_ = {queries.keep(), queries_f32.keep()};
    if (filter) take_filter(*filter);
    const int64_t n = request_.n_queries;
    if (absent) {
      absent_ = to_vector(*absent, "absent", n * searcher_->view().copies);
      request_.absent = absent_.data();
    }
    if (parts) take_parts(*parts);
    check_parts();
    rows_.resize(n * k), distances_.resize(n * k), seconds_.resize(n);
    for (auto* each : {&pages_, &code_pages_, &measured_, &estimated_}) each->resize(n);
    request_.rows = rows_.data(), request_.distances = distances_.data(),
    request_.seconds = seconds_.data();
    request_.pages = pages_.data(), request_.code_pages = code_pages_.data();
    request_.measured = measured_.data(), request_.estimated = estimated_.data();
    job_ = searcher_->start(request_);
  }
  ~PyGraphSearch() {
    if (process_ != getpid()) {
      [[maybe_unused]] auto* left =
          new std::pair(std::move(job_), std::move(searcher_));  // the parent's
      return;
    }
    {
      py::gil_scoped_release unlocked;
      if (!over_) searcher_->cancel(job_);
      job_.reset();
      searcher_.reset();
    }
    keeps_.clear();
    free_kept();
  }

  // (rows int64, distances float32), [n_queries * k]: the nearest so far, once each walk has read
  // so many pages or ended.
  std::pair<NewTensor, NewTensor> partial(int64_t pages) {
    check();
    early_rows_.resize(rows_.size()), early_distances_.resize(rows_.size());
    request_.early_rows = early_rows_.data(), request_.early_distances = early_distances_.data();
    run_interruptibly([&](const std::function<bool()>& interrupted) {
      searcher_->partial(job_, pages, interrupted);
    });
    return {to_tensor(std::vector<int64_t>(early_rows_)),
            to_tensor(std::vector<float>(early_distances_))};
  }

  py::tuple finish() {
    check();
    over_ = true;
    run_interruptibly(
        [&](const std::function<bool()>& interrupted) { searcher_->finish(job_, interrupted); });
    return py::make_tuple(to_tensor(std::move(rows_)), to_tensor(std::move(distances_)),
                          to_tensor(std::move(pages_)), to_tensor(std::move(code_pages_)),
                          to_tensor(std::move(measured_)), to_tensor(std::move(estimated_)),
                          to_tensor(std::move(seconds_)));
  }

  // While another thread waits, too.
  void cancel() {
    if (process_ != getpid()) return;  // the parent's
    py::gil_scoped_release unlocked;
    GraphSearcher::call_off(job_);
  }

 private:
  void take_filter(const py::dict& given) {
    const graph::PageLayout& layout = searcher_->view().layout;
    const std::vector<graph::Part>& parts = searcher_->view().parts;
    const auto bits = [&](const char* name, int64_t count) {
      const auto tensor = given[name].cast<Tensor>();
      const auto* found = contiguous<const uint8_t>(tensor, Dtype::uint8, name, "uint8");
      if (tensor.numel() < (count + 7) / 8)
        invalid(std::string(name) + " must have a bit for each row");
      keeps_.push_back(tensor.keep());
      return found;
    };
    const graph::Part& last = parts.back();
    filter_.rows = bits("rows", layout.n);
    filter_.nodes = bits("nodes", last.first_page * layout.nodes_per_page + last.n);
    const auto n_parts = static_cast<int64_t>(parts.size());
    const auto counts = to_vector(given["counts"].cast<Tensor>(), "counts", n_parts),
               pages = to_vector(given["pages"].cast<Tensor>(), "pages", n_parts),
               begin =
                   to_vector(given["entries_begin"].cast<Tensor>(), "entries_begin", n_parts + 1);
    std::tie(filter_.entries, filter_.entry_codes) = to_entries(
        given["entries"].cast<Tensor>(), given["entry_codes"].cast<Tensor>(), begin, parts, layout);
    for (int64_t i = 0; i < n_parts; ++i)
      filter_.parts.push_back({counts[i], pages[i], begin[i], begin[i + 1]});
    request_.filter = &filter_;
  }

  // (numbers of parts, where each query's begin)
  void take_parts(const std::pair<Tensor, Tensor>& given) {
    parts_begin_ = to_vector(given.second, "parts_begin", request_.n_queries + 1);
    parts_ = to_vector(given.first, "parts", -1);
    const auto n_parts = static_cast<int64_t>(searcher_->view().parts.size());
    if (parts_begin_.front() != 0 || parts_begin_.back() != static_cast<int64_t>(parts_.size()) ||
        !std::is_sorted(parts_begin_.begin(), parts_begin_.end())) {
      invalid("parts must be those of each query");
    }
    for (const int64_t each : parts_) {
      if (each < 0 || each >= n_parts) invalid("no such part");
    }
    parts_.reserve(1);  // so that none of them is not all of them
    request_.parts = parts_.data(), request_.parts_begin = parts_begin_.data();
  }

  // A walk numbers the nodes of its parts by 32 bits.
  void check_parts() const {
    const GraphView& view = searcher_->view();
    const auto nodes_of = [&](int64_t part) {
      if (view.pages[view.parts[part].file].path.empty()) invalid("a part's file is not there");
      return view.layout.pages_of(view.parts[part]) * view.layout.nodes_per_page;
    };
    const int64_t n_walks = request_.parts == nullptr ? 1 : request_.n_queries;
    for (int64_t q = 0; q < n_walks; ++q) {
      int64_t nodes = 0;
      if (request_.parts == nullptr) {
        for (size_t i = 0; i < view.parts.size(); ++i) nodes += nodes_of(static_cast<int64_t>(i));
      } else {
        for (int64_t i = parts_begin_[q]; i < parts_begin_[q + 1]; ++i)
          nodes += nodes_of(parts_[i]);
      }
      if (nodes >= UINT32_MAX) invalid("the parts of a walk have 2^32 nodes or more");
    }
  }

  void check() const {
    if (process_ != getpid()) invalid("the search belongs to the parent process");
    if (over_) invalid("the search is over");
  }

  std::shared_ptr<GraphSearcher> searcher_;
  std::vector<std::shared_ptr<void>> keeps_;
  graph::SearchRequest request_;
  graph::RowFilter filter_;
  std::vector<int64_t> absent_, parts_, parts_begin_;
  std::vector<int64_t> rows_, early_rows_, pages_, code_pages_, measured_, estimated_;
  std::vector<float> distances_, early_distances_, seconds_;
  std::shared_ptr<GraphSearcher::Job> job_;
  bool over_ = false;
  pid_t process_ = getpid();
};

// Of what 48 bits number.
constexpr int64_t kMostRows = int64_t{1} << 48;

// Checked, but for what other objects must agree with.
graph::PageLayout make_layout(int64_t n, int64_t dim, const std::string& format, int64_t degree,
                              int64_t code_bytes, int64_t inline_codes, bool paged_codes,
                              int64_t disk_pq_bytes, int64_t page_bytes, int64_t nodes_per_page) {
  graph::PageLayout layout;
  layout.n = n, layout.dim = dim, layout.format = to_format(format), layout.degree = degree;
  layout.code_bytes = code_bytes, layout.inline_codes = inline_codes,
  layout.paged_codes = paged_codes;
  layout.disk_pq_bytes = disk_pq_bytes;
  layout.page_bytes = page_bytes, layout.nodes_per_page = nodes_per_page;
  if (n < 0 || n > kMostRows || dim < 1 || dim > kMaxVectorDim || degree < 0 || degree > 65535 ||
      code_bytes < 1 || inline_codes < 0 || inline_codes > degree || disk_pq_bytes < 0 ||
      page_bytes < 512 || nodes_per_page < 1 ||
      graph::kPageHeaderBytes + nodes_per_page * layout.node_bytes() > page_bytes) {
    invalid("the layout of a graph's pages is out of range");
  }
  if (paged_codes && code_bytes > graph::kCodePageBytes - graph::kPageHeaderBytes) {
    invalid("a code is longer than a page of codes");
  }
  return layout;
}

// `centroids` [256, dim] of parts that begin so, the last number being dim; `rotation` [dim, dim]
// of the vectors that they are of.
graph::Codebook make_codebook(const std::vector<int64_t>& parts, const Tensor& centroids,
                              const std::optional<Tensor>& rotation) {
  if (parts.size() < 2 || parts.front() != 0 || !std::is_sorted(parts.begin(), parts.end())) {
    invalid("parts must go from 0 to dim");
  }
  const int64_t dim = parts.back();
  const auto* values = contiguous<const float>(centroids, Dtype::float32, "centroids", "float32");
  if (centroids.dim() != 2 || centroids.size(0) != kCentroids || centroids.size(1) != dim) {
    invalid("centroids must be [256, dim]");
  }
  graph::Codebook book(parts, values);
  if (!rotation) return book;
  book.rotation = contiguous<const float>(*rotation, Dtype::float32, "rotation", "float32");
  if (rotation->dim() != 2 || rotation->size(0) != dim || rotation->size(1) != dim) {
    invalid("a rotation must be [dim, dim]");
  }
  book.rotation_owner = rotation->keep();
  return book;
}

graph::PagesAt to_place(const std::pair<std::string, int64_t>& place) {
  if (place.second < 0 || place.second % 4096 != 0) {
    invalid("pages of a graph must begin at a multiple of 4096 bytes");
  }
  return {place.first, place.second};
}

// Of each graph the nodes, the file that it lies in, the page at which it begins there, and its
// salt.
struct PartTables {
  std::vector<int64_t> nodes, files, file_pages, salts;
};

std::vector<graph::Part> make_parts(const PartTables& tables, size_t n_files,
                                    const std::vector<int64_t>& entries_begin,
                                    const graph::PageLayout& layout) {
  std::vector<graph::Part> parts;
  int64_t first_page = 0;
  for (size_t number = 0; number < tables.nodes.size(); ++number) {
    graph::Part part;
    part.first_page = first_page, part.n = tables.nodes[number];
    if (part.n < 0 || part.n >= UINT32_MAX) invalid("a part must have fewer than 2^32 - 1 nodes");
    part.salt = static_cast<uint64_t>(tables.salts[number]);
    part.first_entry = entries_begin[number], part.end_entry = entries_begin[number + 1];
    part.file = tables.files[number], part.file_page = tables.file_pages[number];
    if (part.file < 0 || part.file >= static_cast<int64_t>(n_files) || part.file_page < 0)
      invalid("no such file");
    first_page += layout.pages_of(part);
    parts.push_back(part);
  }
  if (parts.empty()) invalid("a graph must have a part");
  return parts;
}

GraphView make_view(const std::vector<std::pair<std::string, int64_t>>& pages,
                    const std::pair<std::string, int64_t>& code_pages,
                    const graph::PageLayout& layout, const std::string& metric,
                    const graph::Codebook& book, const std::optional<graph::Codebook>& disk_book,
                    const std::optional<Tensor>& codes, const Tensor& part_nodes,
                    const Tensor& part_files, const Tensor& part_pages, const Tensor& part_salts,
                    int64_t copies, const Tensor& entries, const Tensor& entry_codes,
                    const Tensor& entries_begin) {
  GraphView view;
  for (const auto& each : pages) view.pages.push_back(to_place(each));
  if (std::all_of(view.pages.begin(), view.pages.end(),
                  [](const graph::PagesAt& each) { return each.path.empty(); })) {
    invalid("a graph must have a file of pages");
  }
  view.code_pages = to_place(code_pages);
  view.layout = layout, view.metric = to_metric(metric), view.book = book;
  if (book.parts() != layout.code_bytes || book.begin.back() != layout.dim)
    invalid("a codebook must be of the layout");
  if (disk_book) view.disk_book = *disk_book;
  if (layout.disk_pq_bytes != (disk_book ? disk_book->parts() : 0) ||
      (disk_book && disk_book->begin.back() != layout.dim)) {
    invalid("a codebook of what nodes hold must be of the layout");
  }
  if (codes) {
    view.codes = contiguous<const uint8_t>(*codes, Dtype::uint8, "codes", "uint8");
    if (codes->dim() != 2 || codes->size(0) != layout.n || codes->size(1) != layout.code_bytes) {
      invalid("codes must be [n, bytes]");
    }
    view.codes_owner = codes->keep();
  } else if (!layout.paged_codes && layout.inline_codes < layout.degree) {
    invalid("codes in memory are needed");
  }
  const int64_t n_parts = part_nodes.numel();
  const auto begin = to_vector(entries_begin, "entries_begin", n_parts + 1);
  const PartTables tables{
      to_vector(part_nodes, "part_nodes", n_parts), to_vector(part_files, "part_files", n_parts),
      to_vector(part_pages, "part_pages", n_parts), to_vector(part_salts, "part_salts", n_parts)};
  view.parts = make_parts(tables, view.pages.size(), begin, layout);
  if (copies < 1 || copies > static_cast<int64_t>(view.parts.size()))
    invalid("a row has at most one node in each part");
  view.copies = copies;
  if (view.parts.size() > 1 && layout.inline_codes < layout.degree)
    invalid("graphs of several parts have their codes inline");
  std::tie(view.entries, view.entry_codes) =
      to_entries(entries, entry_codes, begin, view.parts, layout);
  return view;
}

graph::SearchOptions make_options(const std::string& path, std::optional<bool> direct, int threads,
                                  int64_t walks, int64_t code_cache_bytes, double grace_s,
                                  const std::vector<py::dict>& rules, uint64_t seed) {
  if (threads < 1 || threads > 256 || walks < 1 || walks > 1024)
    invalid("threads must be 1 to 256, walks 1 to 1024");
  if (code_cache_bytes < 0) invalid("code_cache_bytes must be 0 or more");
  if (!(grace_s >= 0 && grace_s <= 1e9)) invalid("grace_s must be 0 to 1e9");
  graph::SearchOptions options;
  options.path = path, options.threads = threads, options.walks = walks,
  options.code_cache_bytes = code_cache_bytes;
  if (direct) options.direct = *direct ? io::Direct::yes : io::Direct::no;
  options.grace_ns = static_cast<int64_t>(grace_s * 1e9);
  for (const auto& rule : rules) options.rules.push_back(to_fault_rule(rule));
  options.seed = seed;
  return options;
}

// A searcher in the process that opened it: its threads are not in a child's.
class PyGraphSearcher {
 public:
  PyGraphSearcher(const GraphView& view, const graph::SearchOptions& options) {
    py::gil_scoped_release unlocked;
    searcher_ = std::make_shared<GraphSearcher>(view, options);
  }
  ~PyGraphSearcher() {
    if (process_ != getpid()) {
      [[maybe_unused]] auto* left =
          new std::shared_ptr(std::move(searcher_));  // its threads are the parent's
      return;
    }
    {
      py::gil_scoped_release unlocked;
      searcher_.reset();
    }
    free_kept();
  }

  std::unique_ptr<PyGraphSearch> start(const Tensor& queries, const Tensor& queries_f32, int64_t k,
                                       int64_t list_size, int64_t far_list_size, int64_t beam_width,
                                       float stop_beyond, const std::optional<py::dict>& filter,
                                       const std::optional<Tensor>& absent,
                                       const std::optional<std::pair<Tensor, Tensor>>& parts,
                                       double deadline_s) {
    check();
    return std::make_unique<PyGraphSearch>(searcher_, queries, queries_f32, k, list_size,
                                           far_list_size, beam_width, stop_beyond, filter, absent,
                                           parts, deadline_s);
  }

  void close() {
    check();
    py::gil_scoped_release unlocked;
    searcher_->close();
  }

  std::tuple<std::string, std::string, bool> path() const {
    return {searcher_->effective(), searcher_->fallback_reason(), searcher_->direct()};
  }

 private:
  void check() const {
    if (process_ != getpid())
      invalid("the graph belongs to the parent process; open it after fork()");
  }

  std::shared_ptr<GraphSearcher> searcher_;
  pid_t process_ = getpid();
};

}  // namespace

void bind_graph(py::module_& m) {
  py::class_<PyVamana>(m, "Vamana")
      .def(py::init<const Tensor&, const std::string&, int64_t, int64_t, float, int, bool, int,
                    uint64_t>(),
           py::kw_only(), py::arg("vectors"), py::arg("format"), py::arg("degree"),
           py::arg("list_size"), py::arg("alpha"), py::arg("passes"), py::arg("saturate"),
           py::arg("threads"), py::arg("seed"))
      .def_static("from_edges", &PyVamana::from_edges, py::kw_only(), py::arg("vectors"),
                  py::arg("format"), py::arg("neighbours"), py::arg("counts"), py::arg("medoid"),
                  py::arg("list_size"))
      .def("build", &PyVamana::build)
      .def("connect", &PyVamana::connect)
      .def("leading_to", &PyVamana::leading_to)
      .def("edges", &PyVamana::edges)
      .def("pack", &PyVamana::pack)
      .def_property_readonly("medoid", &PyVamana::medoid);
  m.def("prune_candidates", &prune_candidates, py::kw_only(), py::arg("targets"),
        py::arg("candidates"), py::arg("vectors"), py::arg("degree"), py::arg("alpha"),
        py::arg("threads"));
  py::class_<PyGraphSearch>(m, "GraphSearch")
      .def("partial", &PyGraphSearch::partial)
      .def("finish", &PyGraphSearch::finish)
      .def("cancel", &PyGraphSearch::cancel);
  py::class_<graph::PageLayout>(m, "PageLayout")
      .def(py::init(&make_layout), py::kw_only(), py::arg("n"), py::arg("dim"), py::arg("format"),
           py::arg("degree"), py::arg("code_bytes"), py::arg("inline_codes"),
           py::arg("paged_codes"), py::arg("disk_pq_bytes"), py::arg("page_bytes"),
           py::arg("nodes_per_page"));
  py::class_<graph::Codebook>(m, "Codebook")
      .def(py::init(&make_codebook), py::kw_only(), py::arg("parts"), py::arg("centroids"),
           py::arg("rotation"));
  py::class_<GraphView>(m, "GraphView")
      .def(py::init(&make_view), py::kw_only(), py::arg("pages"), py::arg("code_pages"),
           py::arg("layout"), py::arg("metric"), py::arg("book"), py::arg("disk_book"),
           py::arg("codes"), py::arg("part_nodes"), py::arg("part_files"), py::arg("part_pages"),
           py::arg("part_salts"), py::arg("copies"), py::arg("entries"), py::arg("entry_codes"),
           py::arg("entries_begin"));
  py::class_<graph::SearchOptions>(m, "GraphSearchOptions")
      .def(py::init(&make_options), py::kw_only(), py::arg("path"), py::arg("direct"),
           py::arg("threads"), py::arg("walks"), py::arg("code_cache_bytes"),
           py::arg("grace_s") = 1.0, py::arg("rules"), py::arg("seed"));
  py::class_<PyGraphSearcher>(m, "GraphSearcher")
      .def(py::init<const GraphView&, const graph::SearchOptions&>(), py::arg("graph"),
           py::arg("options"))
      .def("start", &PyGraphSearcher::start, py::kw_only(), py::arg("queries"),
           py::arg("queries_f32"), py::arg("k"), py::arg("list_size"), py::arg("far_list_size"),
           py::arg("beam_width"), py::arg("stop_beyond"), py::arg("filter"), py::arg("absent"),
           py::arg("parts"), py::arg("deadline_s"))
      .def("close", &PyGraphSearcher::close)
      .def_property_readonly("path", &PyGraphSearcher::path);
}

}  // namespace espnx::python
