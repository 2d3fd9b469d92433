// The part of DLPack 1.x (github.com/dmlc/dlpack, "C exchange API") that reading and making a tensor needs. Its layout
// is an ABI that only a new major version may change.
#pragma once

#include <cstdint>

namespace dcoll::bind::dlpack {

inline constexpr uint32_t kMajorVersion = 1;
inline constexpr char kAttribute[] = "__dlpack_c_exchange_api__";  // of the tensor's type
inline constexpr char kCapsule[] = "dlpack_exchange_api";

inline constexpr int32_t kCpu = 1;  // DLDeviceType
enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

struct Tensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;  // in elements; before 1.2, null may stand for row-major order
  uint64_t byte_offset;
};
static_assert(sizeof(Tensor) == 48);

// A tensor with an owner: whoever takes it calls deleter(self) once.
struct ManagedTensor {
  uint32_t major_version;
  uint32_t minor_version;
  void* manager_ctx;
  void (*deleter)(ManagedTensor* self);
  uint64_t flags;
  Tensor tensor;
};
static_assert(sizeof(ManagedTensor) == 80);
using FromManaged = int (*)(ManagedTensor* tensor, void** object);

struct ExchangeApi {
  uint32_t major_version;
  uint32_t minor_version;
  ExchangeApi* older_version;
  void* allocate;
  void* managed_from_object;
  // Makes an object, a new reference, which takes the tensor over. Not 0: a Python error is set.
  FromManaged managed_to_object;  // may be null
  // Fills the tensor without owning anything: valid until control goes back to Python. Not 0: a Python error is set.
  int (*tensor_from_object)(void* object, Tensor* out);  // may be null
  void* current_work_stream;
};
static_assert(sizeof(ExchangeApi) == 56);

}  // namespace dcoll::bind::dlpack
