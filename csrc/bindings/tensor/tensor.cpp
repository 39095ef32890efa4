#include "tensor.hpp"

#include <algorithm>
#include <array>
#include <mutex>
#include <new>
#include <ostream>
#include <utility>

namespace espnx::python {
namespace {

struct Torch {
  PyTypeObject* tensor = nullptr;
  const dlpack::Exchange* exchange = nullptr;
};
Torch torch;  // for good: torch cannot be unloaded

struct Layout {
  Dtype dtype;
  uint8_t code, bits;
};
constexpr Layout kLayouts[] = {
    {Dtype::uint8, dlpack::kUInt, 8},     {Dtype::uint16, dlpack::kUInt, 16},
    {Dtype::uint32, dlpack::kUInt, 32},   {Dtype::int64, dlpack::kInt, 64},
    {Dtype::float16, dlpack::kFloat, 16}, {Dtype::bfloat16, dlpack::kBfloat, 16},
    {Dtype::float32, dlpack::kFloat, 32},
};

std::mutex& kept_mutex() {
  static auto* instance = new std::mutex();
  return *instance;
}

std::vector<PyObject*>& no_longer_kept() {
  static auto* instance = new std::vector<PyObject*>();
  return *instance;
}

// What a tensor over our memory refers to.
struct Owned {
  static constexpr size_t kMaxDims = 4;

  dlpack::ManagedTensor managed{};
  std::array<int64_t, kMaxDims> shape{}, strides{};
  std::shared_ptr<void> owner;

  static void free(dlpack::ManagedTensor* managed) { delete static_cast<Owned*>(managed->context); }
};

dlpack::DataType data_type(Dtype dtype) {
  const auto* found = std::find_if(std::begin(kLayouts), std::end(kLayouts),
                                   [&](const Layout& layout) { return layout.dtype == dtype; });
  return {found->code, found->bits, 1};
}

}  // namespace

void find_torch() {
  const py::object tensor = py::module_::import("torch").attr("Tensor");
  const py::object capsule = py::getattr(tensor, "__dlpack_c_exchange_api__", py::none());
  const auto* exchange =
      static_cast<dlpack::Exchange*>(PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsule)
                                         ? PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsule)
                                         : nullptr);
  while (exchange != nullptr && exchange->version.major != dlpack::kMajor)
    exchange = exchange->previous;
  if (exchange == nullptr || exchange->to_view == nullptr) {
    throw py::import_error(
        "espnx needs DLPack 1 with views from torch, as torch 2.11 has them; got torch " +
        py::str(py::module_::import("torch").attr("__version__")).cast<std::string>());
  }
  torch = {reinterpret_cast<PyTypeObject*>(tensor.inc_ref().ptr()), exchange};
}

bool Tensor::load(py::handle source) {
  if (PyType_IsSubtype(Py_TYPE(source.ptr()), torch.tensor) == 0) return false;
  object_ = source;
  if (torch.exchange->to_view(source.ptr(), &view_) != 0) {
    PyErr_Clear();
    view_ = {};
  } else if (view_.data == nullptr &&
             numel() > 0) {  // one that torch traces with says that it is on the CPU
    view_ = {};
  }
  return true;
}

int64_t Tensor::stride(int64_t axis) const {
  if (view_.strides != nullptr) return view_.strides[axis];
  int64_t stride = 1;
  for (int64_t later = axis + 1; later < dim(); ++later) stride *= size(later);
  return stride;
}

int64_t Tensor::numel() const {
  int64_t count = 1;
  for (int64_t axis = 0; axis < dim(); ++axis) count *= size(axis);
  return count;
}

bool Tensor::is_contiguous() const {
  int64_t expected = 1;
  bool fits = true;
  for (int64_t axis = dim() - 1; axis >= 0; --axis) {
    if (size(axis) == 0) return true;
    fits = fits && (size(axis) == 1 || stride(axis) == expected);
    expected *= size(axis);
  }
  return fits;
}

int64_t Tensor::item_bytes() const { return std::max(1, view_.dtype.bits / 8); }

bool Tensor::is_aligned() const {
  const auto place = reinterpret_cast<uintptr_t>(view_.data) + view_.offset_bytes;
  return place % static_cast<uintptr_t>(item_bytes()) == 0;
}

bool Tensor::is_cpu() const {
  const int32_t type = view_.device.type;
  return type == dlpack::kCpu || type == dlpack::kCudaHost || type == dlpack::kRocmHost;
}

Dtype Tensor::dtype() const {
  const auto [code, bits, lanes] = view_.dtype;
  for (const Layout& layout : kLayouts) {
    if (layout.code == code && layout.bits == bits && lanes == 1) return layout.dtype;
  }
  return Dtype::other;
}

std::shared_ptr<void> Tensor::keep() const {
  return {object_.attr("untyped_storage")().release().ptr(), [](void* storage) {
            std::lock_guard lock(kept_mutex());
            no_longer_kept().push_back(static_cast<PyObject*>(storage));
          }};
}

std::ostream& operator<<(std::ostream& out, const Tensor& tensor) {
  const auto text = [](const py::object& value) { return py::str(value).cast<std::string>(); };
  const py::handle object = tensor.object_;
  return out << text(object.attr("dtype")) << ' ' << text(py::list(object.attr("shape"))) << " on "
             << text(object.attr("device"));
}

NewTensor::NewTensor(const void* data, Dtype dtype, const std::vector<int64_t>& shape,
                     std::shared_ptr<void> owner) {
  auto owned = std::make_unique<Owned>();
  std::copy(shape.begin(), shape.end(), owned->shape.begin());
  int64_t stride = 1;
  for (size_t axis = shape.size(); axis-- > 0; stride *= owned->shape[axis])
    owned->strides[axis] = stride;
  owned->owner = std::move(owner);
  dlpack::ManagedTensor& managed = owned->managed;
  managed = {{dlpack::kMajor, 0}, owned.get(), &Owned::free, 0, {}};
  managed.tensor = {const_cast<void*>(data),
                    {dlpack::kCpu, 0},
                    static_cast<int32_t>(shape.size()),
                    data_type(dtype),
                    owned->shape.data(),
                    owned->strides.data(),
                    0};
  owned.release();
  void* object = nullptr;
  if (torch.exchange->from_managed(&managed, &object) != 0) throw py::error_already_set();
  m_ptr = static_cast<PyObject*>(object);
}

NewFloats::NewFloats(std::vector<int64_t> shape) : shape_(std::move(shape)) {
  constexpr int64_t kMost = int64_t{1} << 48;
  int64_t count = 1;
  for (const int64_t size : shape_) {
    if (__builtin_mul_overflow(count, size, &count) || count > kMost) throw std::bad_alloc();
  }
  values_ = std::make_shared<AlignedFloats>(count);
}

void free_kept() {
  std::vector<PyObject*> found;
  {
    std::lock_guard lock(kept_mutex());
    found.swap(no_longer_kept());
  }
  for (PyObject* storage : found) Py_DECREF(storage);
}

}  // namespace espnx::python
