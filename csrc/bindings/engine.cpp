// The module, and what Python sees of the storage engine: objects with state.
// Failures cross as espnx.errors classes, made by the function that espnx.storage registers with
// set_error_factory.

#include <cmath>
#include <memory>

#include "bindings.hpp"
#include "cpu/crc32c.hpp"

namespace espnx::python {

std::pair<NewTensor, bool> Future::next(int64_t at_least, double timeout_s) {
  check();
  if (std::isnan(timeout_s)) invalid("timeout_s is not a number");
  std::vector<int64_t> items;
  bool finished = false;
  const auto until =
      io::Clock::now() +
      std::chrono::nanoseconds(static_cast<int64_t>(std::clamp(timeout_s, 0.0, 1e9) * 1e9));
  for (;;) {
    {
      py::gil_scoped_release unlocked;
      const int64_t left_ns = (until - io::Clock::now()).count();
      finished = transfer->next(items, at_least, std::clamp<int64_t>(left_ns, 0, kSignalCheckNs));
    }
    if (finished || static_cast<int64_t>(items.size()) >= at_least || io::Clock::now() >= until)
      break;
    if (PyErr_CheckSignals() != 0) {
      cancel();
      throw py::error_already_set();
    }
  }
  return {to_tensor(items), finished};
}

io::FaultRule to_fault_rule(const py::dict& d) {
  io::FaultRule rule;
  rule.operation = d["operation"].cast<std::string>();
  rule.path = d["path"].cast<std::string>();
  rule.begin_bytes = d["begin_bytes"].cast<int64_t>();
  rule.end_bytes = d["end_bytes"].cast<int64_t>();
  rule.nth = d["nth"].cast<int64_t>();
  rule.count = d["count"].cast<int64_t>();
  rule.probability = d["probability"].cast<double>();
  rule.value = d["value"].cast<int64_t>();
  const auto fault = d["fault"].cast<std::string>();
  if (fault == "error")
    rule.fault = io::Fault::error;
  else if (fault == "short")
    rule.fault = io::Fault::short_;
  else if (fault == "flip")
    rule.fault = io::Fault::flip;
  else if (fault == "stale")
    rule.fault = io::Fault::stale;
  else if (fault == "delay")
    rule.fault = io::Fault::delay;
  else if (fault == "never")
    rule.fault = io::Fault::never;
  else
    invalid("unknown fault '" + fault + "'");
  return rule;
}

namespace {

py::object& error_factory() {
  static auto* factory =
      new py::object();  // never destroyed: failures may come after Python's own clean-up began
  return *factory;
}

const char* kind_name(io::Kind kind) {
  switch (kind) {
    case io::Kind::read: return "read";
    case io::Kind::write: return "write";
    case io::Kind::short_read: return "short_read";
    case io::Kind::truncated: return "truncated";
    case io::Kind::disk_full: return "disk_full";
    case io::Kind::deadline: return "deadline";
    case io::Kind::closed: return "closed";
    case io::Kind::cancelled: return "cancelled";
    case io::Kind::checksum: return "checksum";
    case io::Kind::invalid: return "invalid";
    case io::Kind::unavailable: return "unavailable";
  }
  return "read";
}

// Paths are bytes; Python's own way of making text of them loses none.
py::object path_text(const std::string& path) {
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size())));
}

void raise_failure(const io::Failure& f) {
  if (!error_factory()) {  // espnx._C used without espnx.storage
    PyErr_SetString(PyExc_RuntimeError, f.what.c_str());
    return;
  }
  py::object exception = error_factory()(
      py::arg("kind") = kind_name(f.kind), py::arg("errno") = f.error,
      py::arg("what") = path_text(f.what), py::arg("path") = path_text(f.path),
      py::arg("offset_bytes") = f.offset_bytes, py::arg("size_bytes") = f.size_bytes,
      py::arg("needed_bytes") = f.needed_bytes, py::arg("free_bytes") = f.free_bytes,
      py::arg("got") = f.got, py::arg("expected") = f.expected);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
}

Future submit(const std::shared_ptr<io::Engine>& engine, bool reading, const Tensor& file,
              const Tensor& offset_bytes, const Tensor& size_bytes,
              const std::optional<Tensor>& out_offset_bytes, const std::optional<Tensor>& crc32c,
              const std::optional<Tensor>& memory, int64_t gap_bytes, int priority,
              double deadline_s) {
  free_kept();
  io::TransferSpec spec;
  spec.reading = reading;
  spec.file = to_vector(file, "file", -1);
  const auto count = static_cast<int64_t>(spec.file.size());
  spec.offset_bytes = to_vector(offset_bytes, "offset_bytes", count);
  spec.size_bytes = to_vector(size_bytes, "size_bytes", count);
  if (out_offset_bytes)
    spec.out_offset_bytes = to_vector(*out_offset_bytes, "out_offset_bytes", count);
  if (crc32c) spec.crc32c = to_vector(*crc32c, "crc32c", count);
  if (out_offset_bytes.has_value() != memory.has_value())
    invalid("out_offset_bytes and the memory they point into come together");
  if (memory) {
    spec.base = contiguous<char>(*memory, Dtype::uint8, "the memory of a plan", "uint8");
    spec.base_bytes = memory->numel();
    spec.keep_alive = memory->keep();
  }
  if (gap_bytes < 0 || !(deadline_s > 0))
    invalid("gap_bytes must not be negative and deadline_s must be positive");
  spec.gap_bytes = gap_bytes;
  spec.priority = priority;
  spec.deadline_s = deadline_s;
  py::gil_scoped_release unlocked;
  return {engine, engine->submit(std::move(spec))};
}

std::shared_ptr<io::Engine> make_engine(const std::string& path, unsigned queue_depth,
                                        unsigned threads, int64_t request_bytes, int64_t pool_bytes,
                                        bool poison, const std::vector<py::dict>& rules,
                                        uint64_t seed) {
  io::EngineOptions options;
  options.path = path;
  options.queue_depth = queue_depth;
  options.threads = threads;
  options.request_bytes = request_bytes;
  options.pool_bytes = pool_bytes;
  options.poison = poison;
  for (const py::dict& rule : rules) options.rules.push_back(to_fault_rule(rule));
  options.seed = seed;
  py::gil_scoped_release unlocked;
  // Closing waits for the I/O thread, and others must be able to run meanwhile.
  return {new io::Engine(std::move(options)), [](io::Engine* engine) {
            if (!PyGILState_Check()) {
              delete engine;
              return;
            }
            py::gil_scoped_release released;
            delete engine;
          }};
}

py::dict stats_dict(io::Engine& engine) {
  free_kept();
  const io::EngineStats stats = [&] {
    py::gil_scoped_release unlocked;
    return engine.stats();
  }();
  py::dict result;
  result["bytes_asked"] = stats.bytes_asked;
  result["bytes_moved"] = stats.bytes_moved;
  result["requests"] = stats.requests;
  result["retries"] = stats.retries;
  result["failures"] = stats.failures;
  result["in_flight"] = stats.in_flight;
  result["quarantined_buffers"] = stats.quarantined_buffers;
  result["quarantined_bytes"] = stats.quarantined_bytes;
  result["fault_hits"] = stats.fault_hits;
  return result;
}

io::Mode to_mode(const std::string& mode) {
  if (mode == "r") return io::Mode::read;
  if (mode == "w") return io::Mode::create;
  if (mode == "r+") return io::Mode::update;
  invalid("unknown mode '" + mode + "' (r, w or r+)");
}

io::Direct to_direct(const std::optional<bool>& direct) {
  if (!direct) return io::Direct::automatic;
  return *direct ? io::Direct::yes : io::Direct::no;
}

// uint8 [size_bytes], uninitialised, page-aligned: it returns to the engine's pool when the last
// tensor over it goes.
NewTensor memory_from(io::Engine& engine, int64_t size_bytes) {
  if (size_bytes < 0) invalid("a negative size");
  std::shared_ptr<io::Buffer> buffer;
  {
    py::gil_scoped_release unlocked;
    buffer = engine.memory(size_bytes);
  }
  return {buffer->data, Dtype::uint8, {size_bytes}, buffer};
}

void bind_engine(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<io::Engine, std::shared_ptr<io::Engine>>(m, "Engine")
      .def(py::init(&make_engine), py::kw_only(), py::arg("path"), py::arg("queue_depth"),
           py::arg("threads"), py::arg("request_bytes"), py::arg("pool_bytes"), py::arg("poison"),
           py::arg("rules"), py::arg("seed"))
      .def_property_readonly("effective", &io::Engine::effective)
      .def_property_readonly("fallback_reason", &io::Engine::fallback_reason)
      .def(
          "open",
          [](io::Engine& e, const std::string& path, const std::string& mode,
             std::optional<bool> direct) {
            const io::Mode how = to_mode(mode);
            py::gil_scoped_release unlocked;
            return e.open(path, how, to_direct(direct));
          },
          py::arg("path"), py::arg("mode"), py::arg("direct"))
      .def("close_file", &io::Engine::close_file, Release())
      .def("file_info",
           [](io::Engine& e, int64_t number) {
             std::shared_ptr<io::File> file;
             {
               py::gil_scoped_release unlocked;
               file = e.file(number);
               file->refresh_size();
             }
             return py::make_tuple(file->size_bytes.load(), file->direct, file->alignment_bytes);
           })
      .def("allocate", &io::Engine::allocate, Release())
      .def("truncate", &io::Engine::truncate, Release())
      .def("sync", &io::Engine::sync, Release())
      .def("sync_directory", &io::Engine::sync_directory, Release())
      .def(
          "before",
          [](io::Engine& e, const std::string& operation, const std::string& path) {
            e.before(operation.c_str(), path);
          },
          Release())
      .def("submit", &submit, py::kw_only(), py::arg("reading"), py::arg("file"),
           py::arg("offset_bytes"), py::arg("size_bytes"), py::arg("out_offset_bytes"),
           py::arg("crc32c"), py::arg("memory"), py::arg("gap_bytes"), py::arg("priority"),
           py::arg("deadline_s"))
      .def("stats", &stats_dict)
      .def("memory", &memory_from)
      .def_property_readonly("mapped_bytes", &io::Engine::mapped_bytes)
      .def("close", &io::Engine::close, Release());
}

void bind_future(py::module_& m) {
  py::class_<Future>(m, "Future")
      .def("next", &Future::next, py::arg("at_least"), py::arg("timeout_s"))
      .def("cancel", &Future::cancel)
      .def("done",
           [](Future& f) {
             f.check();
             return f.transfer->finished();
           })
      .def("is_over",
           [](Future& f) {
             f.check();
             py::gil_scoped_release unlocked;
             if (!f.transfer->finished()) return false;
             // The engine begins pieces under the lock that this takes: what it was about to begin
             // when the transfer ended counts from here on, and no more is begun.
             f.engine->stats();
             return f.transfer->in_flight() == 0;
           })
      .def_property_readonly("memory", &Future::memory)
      .def_property_readonly("position_bytes",
                             [](Future& f) { return to_tensor(f.transfer->position_bytes()); })
      .def_property_readonly("bytes_asked", [](Future& f) { return f.transfer->asked_bytes(); })
      .def_property_readonly("bytes_moved", [](Future& f) { return f.transfer->moved_bytes(); })
      .def_property_readonly("request_count",
                             [](Future& f) { return f.transfer->request_count(); });
}

// The planner without an engine: engines that are not ours (cuFile) still read by the same extents.
py::tuple pack_plan(const Tensor& file_sizes, const Tensor& alignments, const Tensor& file,
                    const Tensor& offset_bytes, const Tensor& size_bytes, int64_t gap_bytes,
                    int64_t limit_bytes) {
  const std::vector<int64_t> sizes = to_vector(file_sizes, "file_sizes", -1);
  const std::vector<int64_t> aligned =
      to_vector(alignments, "alignments", static_cast<int64_t>(sizes.size()));
  const std::vector<int64_t> files = to_vector(file, "file", -1);
  const std::vector<int64_t> offsets =
      to_vector(offset_bytes, "offset_bytes", static_cast<int64_t>(files.size()));
  const std::vector<int64_t> lengths =
      to_vector(size_bytes, "size_bytes", static_cast<int64_t>(files.size()));
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] < 0 || aligned[i] < 1)
      invalid("file_sizes must not be negative, alignments must be positive");
  }
  if (gap_bytes < 0 || limit_bytes < 1)
    invalid("gap_bytes must not be negative and limit_bytes must be positive");
  io::Files known;
  for (size_t i = 0; i < sizes.size(); ++i) {
    known.push_back(std::make_shared<io::File>("file " + std::to_string(i), -1));
    known.back()->size_bytes = sizes[i];
    known.back()->alignment_bytes = aligned[i];
  }
  const io::Items items{static_cast<int64_t>(files.size()), files.data(), offsets.data(),
                        lengths.data()};
  io::check_items(items, known, true);
  const io::Layout layout = io::pack(items, known, gap_bytes, limit_bytes);
  const auto column = [&](int64_t io::Extent::* member) {
    std::vector<int64_t> values;
    for (const io::Extent& extent : layout.extents) values.push_back(extent.*member);
    return to_tensor(values);
  };
  return py::make_tuple(column(&io::Extent::file), column(&io::Extent::offset_bytes),
                        column(&io::Extent::size_bytes), column(&io::Extent::expected_bytes),
                        column(&io::Extent::place_bytes), to_tensor(layout.position_bytes),
                        to_tensor(layout.order), column(&io::Extent::first),
                        column(&io::Extent::last), layout.memory_bytes);
}

}  // namespace
}  // namespace espnx::python

PYBIND11_MODULE(_C, m) {
  using namespace espnx::python;
  m.doc() =
      "espnx's compiled part: the storage engine, streams of records, rows and clusters, and the "
      "CPU versions of the "
      "ops.";
  find_torch();
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const io::FailureError& error) {
      raise_failure(error.failure);
    }
  });
  m.def("set_error_factory", [](py::object factory) { error_factory() = std::move(factory); });
  m.def("free_bytes", &io::free_bytes);
  m.def(
      "crc32c",
      [](uintptr_t address, size_t size_bytes, uint32_t seed) {
        return espnx::crc32c(seed, reinterpret_cast<const void*>(address), size_bytes);
      },
      py::call_guard<py::gil_scoped_release>());
  bind_engine(m);
  bind_future(m);
  bind_records(m);
  bind_rows(m);
  bind_links(m);
  bind_clusters(m);
  bind_graph(m);
  bind_added(m);
  bind_rounds(m);
  bind_postings(m);
  bind_simulate(m);
  bind_ops(m);
  m.def("pack_plan", &pack_plan);
  m.def("reserve_file_numbers", &io::reserve_file_numbers);
}
