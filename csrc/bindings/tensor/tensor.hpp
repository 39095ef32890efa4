// Tensors at the border with Python, without torch's headers: DLPack gives a view of a torch.Tensor
// in less than a tenth of a microsecond, and makes a torch.Tensor of memory that C++ owns. Both
// sides agree on a layout instead of a library, so what is compiled once serves every torch that
// has these functions.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/aligned.hpp"
#include "dlpack.hpp"

namespace espnx::python {

namespace py = pybind11;

enum class Dtype { uint8, uint16, uint32, int64, float16, bfloat16, float32, other };

// Looks up torch's functions. Throws an ImportError where torch is missing or too old. Before
// anything else here.
void find_torch();

// An argument: valid during the call. Nothing is known of its memory yet: look at dtype() and
// is_cpu() before data().
class Tensor {
 public:
  // False: not a torch.Tensor. One that no view can be had of (it has no memory, or a dtype that
  // DLPack does not have) is not on the CPU.
  bool load(py::handle source);

  int64_t dim() const { return view_.ndim; }
  // From the end where `axis` is negative; it must exist.
  int64_t size(int64_t axis) const { return view_.shape[axis < 0 ? axis + view_.ndim : axis]; }
  int64_t stride(int64_t axis) const;  // in elements
  int64_t numel() const;
  int64_t item_bytes() const;
  bool is_contiguous() const;
  bool is_aligned()
      const;  // to its elements: memory that others have made (torch.frombuffer) need not be
  bool is_cpu() const;
  Dtype dtype() const;
  template <typename T>
  T* data() const {
    return reinterpret_cast<T*>(static_cast<char*>(view_.data) + view_.offset_bytes);
  }

  // Its memory for as long as the result lives, in any thread. The storage and not the tensor:
  // `tensor.data = other` would free the memory under a running transfer.
  std::shared_ptr<void> keep() const;

 private:
  friend std::ostream& operator<<(std::ostream& out, const Tensor& tensor);

  py::handle object_;
  dlpack::TensorView view_{};
};

// As errors say it: "torch.float32 [2, 3] on cpu".
std::ostream& operator<<(std::ostream& out, const Tensor& tensor);

// A result: a torch.Tensor over memory of ours.
class NewTensor : public py::object {
 public:
  // `owner` goes when nothing refers to the memory any more, in whichever thread that is.
  NewTensor(const void* data, Dtype dtype, const std::vector<int64_t>& shape,
            std::shared_ptr<void> owner);

  template <typename T>
  static NewTensor of(std::vector<T> values, Dtype dtype) {
    auto owner = std::make_shared<std::vector<T>>(std::move(values));
    return {owner->data(), dtype, {static_cast<int64_t>(owner->size())}, owner};
  }
};

// The memory of a float32 result.
class NewFloats {
 public:
  // Throws std::bad_alloc (in Python a MemoryError), also where the product of the sizes is beyond
  // any memory.
  explicit NewFloats(std::vector<int64_t> shape);

  void fill(float value) { values_->fill(value); }
  float* data() { return values_->data(); }
  NewTensor tensor() const { return {values_->data(), Dtype::float32, shape_, values_}; }

 private:
  std::vector<int64_t> shape_;
  std::shared_ptr<AlignedFloats> values_;
};

inline NewTensor to_tensor(std::vector<int64_t> values) {
  return NewTensor::of(std::move(values), Dtype::int64);
}
inline NewTensor to_tensor(std::vector<float> values) {
  return NewTensor::of(std::move(values), Dtype::float32);
}

// Frees what keep() has let go of. The last reference may go in the I/O thread, where freeing could
// wait for the GIL (Python's objects need it) while the thread that has the GIL waits for the I/O
// thread: it is only put down there, and freed here, in callers' threads, with the GIL.
void free_kept();

}  // namespace espnx::python

namespace pybind11::detail {

template <>
struct type_caster<espnx::python::Tensor> {
  PYBIND11_TYPE_CASTER(espnx::python::Tensor, const_name("torch.Tensor"));
  bool load(handle source, bool /* convert */) { return value.load(source); }
};

template <>
struct handle_type_name<espnx::python::NewTensor> {
  static constexpr auto name = const_name("torch.Tensor");
};

}  // namespace pybind11::detail
