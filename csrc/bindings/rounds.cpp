// Walks in rounds in Python: what is read, and how far it is, is said by a Python object.
#include "graph/rounds.hpp"

#include <limits>
#include <optional>

#include "bindings.hpp"

namespace espnx::python {
namespace {

// As nodes of a graph of so many.
std::vector<uint32_t> to_nodes(const Tensor& tensor, const char* name, int64_t n_nodes) {
  const auto numbers = to_vector(tensor, name, -1);
  for (const int64_t node : numbers) {
    if (node < 0 || node >= n_nodes) invalid(std::string(name) + " must be nodes of the graph");
  }
  return {numbers.begin(), numbers.end()};
}

NewTensor to_numbers(const std::vector<uint32_t>& nodes) {
  return to_tensor(std::vector<int64_t>(nodes.begin(), nodes.end()));
}

// An object with `read(nodes)`, `estimate(node, neighbours, places)` and `upper_neighbours(layer,
// node)`; nodes go back and forth as int64 tensors.
class PySource : public graph::NodeSource {
 public:
  PySource(py::object source, int64_t n_nodes) : source_(std::move(source)), n_nodes_(n_nodes) {}

  void read(const std::vector<uint32_t>& nodes) override {
    source_.attr("read")(to_numbers(nodes));
  }

  std::vector<float> estimate(uint32_t node, const std::vector<uint32_t>& neighbours,
                              const std::vector<int64_t>& places) override {
    const py::object said =
        source_.attr("estimate")(node, to_numbers(neighbours), to_tensor(places));
    const auto distances = said.cast<Tensor>();
    const auto* values = contiguous<const float>(distances, Dtype::float32, "estimates", "float32");
    if (distances.numel() != static_cast<int64_t>(neighbours.size()))
      invalid("an estimate for each neighbour");
    return {values, values + distances.numel()};
  }

  std::vector<uint32_t> upper_neighbours(int64_t layer, uint32_t node) override {
    const py::object said = source_.attr("upper_neighbours")(layer, node);
    return to_nodes(said.cast<Tensor>(), "neighbours", n_nodes_);
  }

 private:
  py::object source_;
  int64_t n_nodes_;
};

class PyRoundWalk {
 public:
  PyRoundWalk(int64_t n_nodes, int64_t k, int64_t list_size, int64_t beam_width, bool by_codes,
              std::optional<int64_t> upper_layers)
      : n_nodes_(n_nodes), walk_({k, list_size, beam_width, by_codes, upper_layers}) {
    if (n_nodes < 0 || n_nodes > std::numeric_limits<uint32_t>::max())
      invalid("a graph has at most 2^32 - 1 nodes");
    if (k < 1 || list_size < k || beam_width < 1 || upper_layers.value_or(0) < 0) {
      invalid("k must be 1 or more, list_size k or more, beam_width 1 or more");
    }
  }

  // (ids int64, distances float32). The source is not kept: it may hold this.
  std::pair<NewTensor, NewTensor> run(py::object source, const Tensor& entries) {
    PySource asked(std::move(source), n_nodes_);
    std::vector<int64_t> ids;
    std::vector<float> distances;
    for (const graph::Found& each : walk_.run(asked, to_nodes(entries, "entries", n_nodes_))) {
      ids.push_back(each.id);
      distances.push_back(each.distance);
    }
    return {to_tensor(std::move(ids)), to_tensor(std::move(distances))};
  }

  // Places of nodes that have not arrived, of each the first.
  NewTensor unknown(const Tensor& numbers) const {
    const auto nodes = to_nodes(numbers, "numbers", n_nodes_);
    graph::NodeSet here;
    here.clear();
    std::vector<int64_t> places;
    for (size_t i = 0; i < nodes.size(); ++i) {
      if (!walk_.knows(nodes[i]) && here.add(nodes[i])) places.push_back(static_cast<int64_t>(i));
    }
    return to_tensor(std::move(places));
  }

  // Nodes that were unknown, [m]; of `neighbours` those from begin[i] to end[i] are one's.
  void arrived(const Tensor& numbers, const Tensor& ids, const Tensor& distances,
               const Tensor& neighbours, const Tensor& begin, const Tensor& end) {
    const auto nodes = to_nodes(numbers, "numbers", n_nodes_),
               near = to_nodes(neighbours, "neighbours", n_nodes_);
    const auto m = static_cast<int64_t>(nodes.size()), total = static_cast<int64_t>(near.size());
    const auto names = to_vector(ids, "ids", m), from = to_vector(begin, "begin", m),
               to = to_vector(end, "end", m);
    const auto* far = contiguous<const float>(distances, Dtype::float32, "distances", "float32");
    if (distances.numel() != m) invalid("a distance for each node");
    for (int64_t i = 0; i < m; ++i) {
      if (from[i] < 0 || to[i] < from[i] || to[i] > total)
        invalid("begin and end must be places of neighbours");
      if (walk_.knows(nodes[i])) invalid("a node arrives once");
      walk_.arrived(nodes[i], names[i], far[i], {near.begin() + from[i], near.begin() + to[i]});
    }
  }

 private:
  int64_t n_nodes_;
  graph::RoundWalk walk_;
};

}  // namespace

void bind_rounds(py::module_& m) {
  py::class_<PyRoundWalk>(m, "RoundWalk")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, bool, std::optional<int64_t>>(),
           py::kw_only(), py::arg("n_nodes"), py::arg("k"), py::arg("list_size"),
           py::arg("beam_width"), py::arg("by_codes"), py::arg("upper_layers"))
      .def("run", &PyRoundWalk::run)
      .def("unknown", &PyRoundWalk::unknown)
      .def("arrived", &PyRoundWalk::arrived);
}

}  // namespace espnx::python
