// Clusters of vectors in Python: a stream that reads and measures them as they arrive.
#include <optional>
#include <tuple>

#include "bindings.hpp"
#include "device/cluster_stream.hpp"
#include "streams.hpp"

namespace espnx::python {
namespace {

using device::ClusterStream;

using PyClusterStream = PyStream<ClusterStream>;

void check(const ClusterStream& stream) { check_process(stream, "clusters"); }

struct PyClusterTicket {
  std::shared_ptr<ClusterStream> stream;
  ClusterStream::Ticket ticket;

  PyClusterTicket(std::shared_ptr<ClusterStream> stream, ClusterStream::Ticket ticket)
      : stream(std::move(stream)), ticket(std::move(ticket)) {}
  PyClusterTicket(PyClusterTicket&&) = default;
  ~PyClusterTicket() {
    if (!ticket) return;
    if (!stream->in_own_process()) {  // a thread of the parent may be waiting in it: see
                                      // Engine::forget
      new ClusterStream::Ticket(std::move(ticket));
      new std::shared_ptr<ClusterStream>(std::move(stream));
      return;
    }
    py::gil_scoped_release unlocked;  // the last reference to a stream waits for its threads
    stream->forget(*ticket);          // nobody will ask: its threads need not go on
    ticket.reset();
    stream.reset();
  }

  std::pair<NewTensor, bool> next(int64_t at_least, double timeout_s) {
    check(*stream);
    return next_items(*stream, *ticket, at_least, timeout_s);
  }

  // uint8 [8 times the vectors]: entries of a reply, a float32 distance and an int32 id each.
  NewTensor replies() const {
    const auto& replies = ClusterStream::replies(*ticket);
    return {replies.data(),
            Dtype::uint8,
            {static_cast<int64_t>(replies.size() * sizeof(device::VectorDistance))},
            std::shared_ptr<void>(ticket)};
  }

  void forget() const {
    check(*stream);
    py::gil_scoped_release unlocked;
    stream->forget(*ticket);
  }
};

DistanceQuery to_query(const Tensor& query, const std::string& format, const std::string& metric) {
  const int of_format = number_of(kVectorFormatNames, format.c_str());
  const int of_metric = number_of(kMetricNames, metric.c_str());
  if (of_format < 0 || of_metric < 0)
    invalid("unknown format or metric '" + format + "', '" + metric + "'");
  const auto kind = static_cast<VectorFormat>(of_format);
  const int64_t d = query.dim() == 1 ? query.numel() : 0;
  if (d < 1 || d > kMaxVectorDim)
    invalid("a query has one dimension, of 1 to " + std::to_string(kMaxVectorDim));
  const void* values =
      is_whole(kind)
          ? static_cast<const void*>(contiguous<uint8_t>(query, Dtype::uint8, "query", "uint8"))
          : contiguous<float>(query, Dtype::float32, "query", "float32");
  return {values, d, kind, static_cast<Metric>(of_metric)};
}

PyClusterTicket push_clusters(const PyClusterStream& self, const Tensor& query,
                              const std::string& format, const std::string& metric, int64_t file,
                              const py::bytes& path, const Tensor& clusters,
                              const Tensor& offset_bytes, const Tensor& n_vectors,
                              const Tensor& crc32c, double deadline_s) {
  check(*self.stream);
  free_kept();
  device::ClusterRequest request{
      to_query(query, format, metric), file, path, {}, {}, {}, {}, deadline_s};
  request.clusters = to_vector(clusters, "clusters", -1);
  const auto count = static_cast<int64_t>(request.clusters.size());
  request.offset_bytes = to_vector(offset_bytes, "offset_bytes", count);
  request.n_vectors = to_vector(n_vectors, "n_vectors", count);
  request.crc32c = to_vector(crc32c, "crc32c", count);
  for (const int64_t n : request.n_vectors) {
    if (n < 0 || n > INT32_MAX) invalid("n_vectors must be 0 to " + std::to_string(INT32_MAX));
  }
  if (!(deadline_s > 0)) invalid("deadline_s must be positive");
  py::gil_scoped_release unlocked;
  return {self.stream, self.stream->push(std::move(request))};
}

}  // namespace

void bind_clusters(py::module_& m) {
  py::class_<PyClusterTicket>(m, "ClusterTicket")
      .def("next", &PyClusterTicket::next, py::arg("at_least"), py::arg("timeout_s"))
      .def("replies", &PyClusterTicket::replies)
      .def("costs",
           [](const PyClusterTicket& self) {
             check(*self.stream);
             return to_dict(ClusterStream::costs(*self.ticket));
           })
      .def("forget", &PyClusterTicket::forget);
  py::class_<PyClusterStream>(m, "ClusterStream")
      .def(py::init<const std::shared_ptr<io::Engine>&, int64_t, int>(), py::arg("engine"),
           py::arg("window_bytes"), py::arg("max_workers"))
      .def("push", &push_clusters)
      .def("clear",
           [](const PyClusterStream& self) {
             check(*self.stream);
             py::gil_scoped_release unlocked;
             self.stream->clear();
           })
      .def("stats", [](const PyClusterStream& self) {
        check(*self.stream);
        return to_dict(self.stream->stats());
      });
}

}  // namespace espnx::python
