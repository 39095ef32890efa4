// The part of DLPack (version 1.3, https://dmlc.github.io/dlpack) by which tensors come in and go
// out: structures of a fixed layout, and the functions that a class of tensors offers for them in
// `__dlpack_c_exchange_api__`.
#pragma once

#include <cstdint>

namespace espnx::dlpack {

constexpr uint32_t kMajor = 1;  // within it the layout only grows at its end

struct Version {
  uint32_t major, minor;
};

enum Device : int32_t {
  kCpu = 1,
  kCudaHost = 3,
  kRocmHost = 11
};  // those whose memory the processor reads

struct DeviceOf {
  int32_t type, number;
};

enum Code : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4 };

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct TensorView {
  void* data;
  DeviceOf device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: contiguous
  uint64_t offset_bytes;
};

// A tensor that whoever gets it frees with `deleter`.
struct ManagedTensor {
  Version version;
  void* context;
  void (*deleter)(ManagedTensor*);
  uint64_t flags;
  TensorView tensor;
};

constexpr const char* kCapsule = "dlpack_exchange_api";

// Functions return 0, or another number with a Python exception set. All of them want the GIL.
struct Exchange {
  Version version;
  Exchange* previous;  // for another major version, or null
  void (*allocate)();  // not called here, hence without its arguments
  int (*to_managed)(void* object, ManagedTensor** tensor);
  int (*from_managed)(ManagedTensor* tensor, void** object);  // takes the tensor
  int (*to_view)(void* object, TensorView* view);  // valid as long as the object; may be null
  int (*current_stream)(int32_t device_type, int32_t device, void** stream);
};

static_assert(sizeof(TensorView) == 48 && sizeof(ManagedTensor) == 80 && sizeof(Exchange) == 56);

}  // namespace espnx::dlpack
