// What the files of bindings share: a future as Python sees it, and how tensors become plan columns.
#pragma once

#include <torch/extension.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "io/engine.hpp"

namespace espnx::python {

namespace py = pybind11;
namespace io = espnx::io;

constexpr int64_t kSignalCheckNs = 50'000'000;  // Ctrl-C is seen at least this often

[[noreturn]] inline void invalid(const std::string& what) {
  io::Failure failure;
  failure.kind = io::Kind::invalid;
  failure.what = what;
  throw io::FailureError(failure);
}

inline std::vector<int64_t> to_vector(const at::Tensor& tensor, const char* name, int64_t count) {
  if (!tensor.device().is_cpu() || tensor.scalar_type() != at::kLong || tensor.dim() != 1) {
    invalid(std::string(name) + " must be a one-dimensional int64 tensor on the CPU");
  }
  if (count >= 0 && tensor.numel() != count) {
    invalid(std::string(name) + " has " + std::to_string(tensor.numel()) + " entries, the plan has " +
            std::to_string(count));
  }
  const at::Tensor flat = tensor.contiguous();
  const auto* data = flat.data_ptr<int64_t>();
  return {data, data + flat.numel()};
}

inline at::Tensor to_tensor(const std::vector<int64_t>& values) {
  return at::tensor(at::IntArrayRef(values), at::kLong);
}

// The callers' memory that transfers have let go of. The last reference may go in the I/O thread, where freeing could
// wait for the GIL (NumPy's memory does) while the thread that has the GIL waits for the I/O thread: it is only put
// down there, and freed in callers' threads.
class Remains {
 public:
  // The storage and not the tensor: `tensor.data = other` would free the memory under a running transfer.
  static std::shared_ptr<void> keep(const at::Tensor& tensor) {
    return {new c10::Storage(tensor.storage()), [](void* storage) {
              std::lock_guard lock(mutex());
              list().emplace_back(static_cast<c10::Storage*>(storage));
            }};
  }

  // Needs the GIL.
  static void free() {
    std::vector<std::unique_ptr<c10::Storage>> found;
    std::lock_guard lock(mutex());
    found.swap(list());
  }  // the lock goes first, then what was found

 private:
  static std::mutex& mutex() {
    static auto* instance = new std::mutex();
    return *instance;
  }
  static std::vector<std::unique_ptr<c10::Storage>>& list() {
    static auto* instance = new std::vector<std::unique_ptr<c10::Storage>>();
    return *instance;
  }
};

// A future: waits for a transfer, keeps the engine and the memory alive.
struct Future {
  std::shared_ptr<io::Engine> engine;
  std::shared_ptr<io::Transfer> transfer;

  Future(std::shared_ptr<io::Engine> engine, std::shared_ptr<io::Transfer> transfer)
      : engine(std::move(engine)), transfer(std::move(transfer)) {}
  Future(Future&&) = default;
  ~Future() {
    if (!transfer) return;
    if (!engine->in_own_process()) {  // a thread of the parent may be waiting in it: see Engine::forget
      new std::shared_ptr<io::Transfer>(std::move(transfer));
      return;
    }
    transfer.reset();
    engine.reset();
    Remains::free();
  }

  void check() const {
    if (!engine->in_own_process()) invalid("the transfer belongs to the parent process; open an engine after fork()");
  }

  // Waits for items with the GIL released; looks for Ctrl-C between.
  std::pair<at::Tensor, bool> next(int64_t at_least, double timeout_s);

  void cancel() {
    check();
    io::Failure failure;
    failure.kind = io::Kind::cancelled;
    failure.what = "the transfer was cancelled";
    py::gil_scoped_release unlocked;
    transfer->fail(failure);
  }

  at::Tensor memory() const {
    auto owner = transfer->memory_owner();
    return at::from_blob(
        transfer->memory(), {transfer->memory_bytes()}, [owner](void*) {}, at::TensorOptions().dtype(at::kByte));
  }
};

// Where records lie, reading them, and scoring them as they arrive.
void bind_records(py::module_& m);

// Stored K/V and X rows: reads that run ahead, attention on rows as they arrive.
void bind_rows(py::module_& m);

}  // namespace espnx::python
