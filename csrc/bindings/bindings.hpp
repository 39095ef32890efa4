// What the files of bindings share: a future as Python sees it, and how tensors become plan
// columns.
#pragma once

#include <pybind11/stl.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/tensor/tensor.hpp"
#include "io/engine.hpp"

namespace espnx::python {

namespace io = espnx::io;

constexpr int64_t kSignalCheckNs = 50'000'000;  // Ctrl-C is seen at least this often

[[noreturn]] inline void invalid(const std::string& what) {
  io::Failure failure;
  failure.kind = io::Kind::invalid;
  failure.what = what;
  throw io::FailureError(failure);
}

// What `work(interrupted)` returns, run without the GIL. `interrupted` says whether a signal's
// handler has raised, from any thread; that exception goes on in place of the failure that the
// interruption became.
template <typename Work>
auto run_interruptibly(const Work& work) {
  const std::function<bool()> interrupted = [] {
    py::gil_scoped_acquire locked;
    return PyErr_CheckSignals() != 0;
  };
  try {
    py::gil_scoped_release unlocked;
    return work(interrupted);
  } catch (const io::FailureError&) {
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    throw;
  }
}

inline std::vector<int64_t> to_vector(const Tensor& tensor, const char* name, int64_t count) {
  if (!tensor.is_cpu() || tensor.dtype() != Dtype::int64 || tensor.dim() != 1) {
    invalid(std::string(name) + " must be a one-dimensional int64 tensor on the CPU");
  }
  const int64_t size = tensor.size(0), stride = tensor.stride(0);
  if (count >= 0 && size != count) {
    invalid(std::string(name) + " has " + std::to_string(size) + " entries, the plan has " +
            std::to_string(count));
  }
  if (!tensor.is_aligned()) invalid(std::string(name) + " must begin at a multiple of 8 bytes");
  const auto* data = tensor.data<const int64_t>();
  if (stride == 1) return {data, data + size};
  std::vector<int64_t> values(size);
  for (int64_t i = 0; i < size; ++i) values[i] = data[i * stride];
  return values;
}

// The memory of a contiguous, aligned tensor of this dtype, or a failure that says what `name` must
// be.
template <typename T>
T* contiguous(const Tensor& tensor, Dtype dtype, const char* name, const char* dtype_name) {
  if (!tensor.is_cpu() || tensor.dtype() != dtype || !tensor.is_contiguous() ||
      !tensor.is_aligned()) {
    invalid(std::string(name) + " must be a contiguous, aligned " + dtype_name +
            " tensor on the CPU");
  }
  return tensor.data<T>();
}

// uint8 [bytes]: what a transfer has read.
inline NewTensor memory_of(const io::Transfer& transfer) {
  return {transfer.memory(), Dtype::uint8, {transfer.memory_bytes()}, transfer.memory_owner()};
}

// A future: waits for a transfer, keeps the engine and the memory alive.
struct Future {
  std::shared_ptr<io::Engine> engine;
  std::shared_ptr<io::Transfer> transfer;

  Future(std::shared_ptr<io::Engine> engine, std::shared_ptr<io::Transfer> transfer)
      : engine(std::move(engine)), transfer(std::move(transfer)) {}
  Future(Future&&) = default;
  ~Future() {
    if (!transfer) return;
    if (!engine->in_own_process()) {  // a thread of the parent may be waiting in it: see
                                      // Engine::forget
      new std::shared_ptr<io::Transfer>(std::move(transfer));
      return;
    }
    transfer.reset();
    engine.reset();
    free_kept();
  }

  void check() const {
    if (!engine->in_own_process())
      invalid("the transfer belongs to the parent process; open an engine after fork()");
  }

  // Waits for items with the GIL released; looks for Ctrl-C between.
  std::pair<NewTensor, bool> next(int64_t at_least, double timeout_s);

  void cancel() {
    check();
    io::Failure failure;
    failure.kind = io::Kind::cancelled;
    failure.what = "the transfer was cancelled";
    py::gil_scoped_release unlocked;
    transfer->fail(failure);
  }

  NewTensor memory() const { return memory_of(*transfer); }
};

// Where records lie, reading them, and scoring them as they arrive.
void bind_records(py::module_& m);

// Stored K/V and X rows: reads that run ahead, attention on rows as they arrive.
void bind_rows(py::module_& m);

// Virtual time of emulated devices.
void bind_links(py::module_& m);
// Clusters of vectors: reading them, and measuring distances as they arrive.
void bind_clusters(py::module_& m);

// Queues without a wall clock.
void bind_simulate(py::module_& m);

// Graphs of vectors: building and searching them.
void bind_graph(py::module_& m);
void bind_added(py::module_& m);

// Walks over graphs of any kind, in rounds.
void bind_rounds(py::module_& m);

// Posting lists: writing, reading and searching them.
void bind_postings(py::module_& m);

// A rule of injected faults, as espnx.storage.FaultRule writes it.
io::FaultRule to_fault_rule(const py::dict& rule);

// The tensor ops' versions for the CPU, as espnx.ops calls them.
void bind_ops(py::module_& m);

}  // namespace espnx::python
