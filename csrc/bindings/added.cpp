// Vectors that were added to a graph, in memory, in Python.
#include "graph/build/added.hpp"

#include <optional>

#include "bindings.hpp"

namespace espnx::python {
namespace {

constexpr int64_t kMostList = int64_t{1} << 20;

class PyAddedGraph {
 public:
  PyAddedGraph(int64_t dim, const std::string& format, const std::string& metric, int64_t degree,
               int64_t list_size, float alpha) {
    const int of = number_of(kVectorFormatNames, format.c_str()),
              by = number_of(kMetricNames, metric.c_str());
    if (of < 0 || by < 0) invalid("unknown vector format or metric");
    if (dim < 1 || dim > kMaxVectorDim || degree < 1 || degree > 1024 || list_size < 1 ||
        !(alpha >= 1) || !(alpha < 16)) {
      invalid("options of a graph are out of range");
    }
    graph::VamanaOptions options;
    options.degree = degree, options.list_size = list_size, options.alpha = alpha;
    graph_ = std::make_unique<graph::AddedGraph>(dim, static_cast<VectorFormat>(of),
                                                 static_cast<Metric>(by), options);
  }
  ~PyAddedGraph() {
    graph_.reset();
    free_kept();
  }

  // Vectors [n, dim]; int8 comes as uint8.
  void hold(const Tensor& rows) {
    const VectorFormat format = graph_->format();
    const auto* data = contiguous<const uint8_t>(rows, dtype_of(format), "rows", "of the graph's");
    if (rows.dim() != 2 || rows.size(1) != graph_->dim() || rows.size(0) >= UINT32_MAX)
      invalid("rows must be [n, dim]");
    const int64_t n = rows.size(0);
    {
      auto owner = rows.keep();
      py::gil_scoped_release unlocked;
      graph_->hold(data, n, std::move(owner));
    }
    free_kept();
  }

  void insert_to(int64_t end) {
    py::gil_scoped_release unlocked;
    graph_->insert_to(end);
  }

  // (distances float32, ids int64 [q * k], measured int64 [q])
  py::tuple search(const Tensor& queries, const Tensor& may, const Tensor& ids, int64_t k,
                   int64_t list_size, int threads,
                   const std::optional<std::pair<Tensor, Tensor>>& known) {
    graph::AddedRequest request;
    const VectorFormat format = graph_->format();
    const bool whole = is_whole(format);
    request.queries = contiguous<const uint8_t>(queries, whole ? Dtype::uint8 : Dtype::float32,
                                                "queries", whole ? "uint8" : "float32");
    if (queries.dim() != 2 || queries.size(1) != graph_->dim()) invalid("queries must be [q, dim]");
    request.n_queries = queries.size(0);
    request.query_bytes = graph_->dim() * (whole ? 1 : 4);
    request.may = contiguous<const uint8_t>(may, Dtype::uint8, "may", "uint8");
    request.ids = contiguous<const int64_t>(ids, Dtype::int64, "ids", "int64");
    request.n = ids.numel();
    if (may.numel() != request.n || request.n > graph_->held())
      invalid("ids and may must be of vectors that are held");
    if (k < 1 || k > kMostList || list_size < 0 || list_size > kMostList || threads < 1 ||
        threads > 1024) {
      invalid("k, list_size or threads are out of range");
    }
    request.k = k, request.list_size = list_size, request.threads = threads;
    if (known) {
      request.known_distances =
          contiguous<const float>(known->first, Dtype::float32, "distances", "float32");
      request.known_ids = contiguous<const int64_t>(known->second, Dtype::int64, "ids", "int64");
      if (known->first.dim() != 2 || known->second.dim() != 2 ||
          known->first.size(0) != request.n_queries || known->second.size(0) != request.n_queries ||
          known->first.size(1) != known->second.size(1)) {
        invalid("what is known must be of each query");
      }
      request.n_known = known->first.size(1);
    }
    std::vector<float> distances(request.n_queries * k);
    std::vector<int64_t> found(request.n_queries * k), measured(request.n_queries);
    request.distances = distances.data(), request.found = found.data();
    request.measured = measured.data();
    {
      py::gil_scoped_release unlocked;
      graph_->search(request);
    }
    return py::make_tuple(to_tensor(std::move(distances)), to_tensor(std::move(found)),
                          to_tensor(std::move(measured)));
  }

  int64_t inserted() const { return graph_->inserted(); }
  int64_t size_bytes() const { return graph_->size_bytes(); }

 private:
  static Dtype dtype_of(VectorFormat format) {
    return format == VectorFormat::kFp32   ? Dtype::float32
           : format == VectorFormat::kFp16 ? Dtype::float16
           : format == VectorFormat::kBf16 ? Dtype::bfloat16
                                           : Dtype::uint8;
  }

  std::unique_ptr<graph::AddedGraph> graph_;
};

}  // namespace

void bind_added(py::module_& m) {
  py::class_<PyAddedGraph>(m, "AddedGraph")
      .def(py::init<int64_t, const std::string&, const std::string&, int64_t, int64_t, float>(),
           py::kw_only(), py::arg("dim"), py::arg("format"), py::arg("metric"), py::arg("degree"),
           py::arg("list_size"), py::arg("alpha"))
      .def("hold", &PyAddedGraph::hold)
      .def("insert_to", &PyAddedGraph::insert_to)
      .def("search", &PyAddedGraph::search, py::kw_only(), py::arg("queries"), py::arg("may"),
           py::arg("ids"), py::arg("k"), py::arg("list_size"), py::arg("threads"), py::arg("known"))
      .def_property_readonly("inserted", &PyAddedGraph::inserted)
      .def_property_readonly("size_bytes", &PyAddedGraph::size_bytes);
}

}  // namespace espnx::python
