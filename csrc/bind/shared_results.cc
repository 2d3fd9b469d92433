#include "bind/shared_results.h"

#include <atomic>
#include <utility>
#include <vector>

namespace dcoll::bind {

// What the tensors have in common, with their descriptions, which torch reads when it makes or frees one.
struct SharedResults::Block {
  struct Tensor {
    dlpack::ManagedTensor managed;
    int64_t shape[Shape::kMostDims];
    int64_t strides[Shape::kMostDims];
  };

  Block(std::shared_ptr<Memory> m, size_t count) : memory(std::move(m)), tensors(count) {}

  // Tensors are freed by any thread: the last one sees what the others did before (release, acquire).
  void release() {
    if (users.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
  static void release_tensor(dlpack::ManagedTensor* tensor) { static_cast<Block*>(tensor->manager_ctx)->release(); }

  std::shared_ptr<Memory> memory;
  std::vector<Tensor> tensors;
  std::atomic<size_t> users{1};  // the tensors and, while they are made, the SharedResults
};

SharedResults::SharedResults(std::shared_ptr<Memory> memory, size_t tensors)
    : block_(new Block(std::move(memory), tensors)) {}

SharedResults::~SharedResults() { block_->release(); }

PyObject* SharedResults::make(dlpack::FromManaged maker, const Operand& operand, const Shape& shape) {
  Block::Tensor& made = block_->tensors.at(made_++);
  int64_t stride = 1;
  for (int dim = shape.ndim; dim-- > 0;) {
    made.shape[dim] = shape.dims[dim];
    made.strides[dim] = stride;
    stride *= shape.dims[dim];
  }
  made.managed.major_version = dlpack::kMajorVersion;
  made.managed.minor_version = 0;
  made.managed.manager_ctx = block_;
  made.managed.deleter = &Block::release_tensor;
  dlpack::Tensor& tensor = made.managed.tensor;
  tensor.data = operand.data;
  tensor.device_type = dlpack::kCpu;
  tensor.ndim = shape.ndim;
  set_type(tensor, operand.dtype);
  tensor.shape = made.shape;
  tensor.strides = made.strides;
  block_->users.fetch_add(1, std::memory_order_relaxed);
  void* object = nullptr;
  // Should it fail, it may or may not have called the deleter, so the block is kept for good.
  if (maker(&made.managed, &object) != 0) return nullptr;
  return static_cast<PyObject*>(object);
}

}  // namespace dcoll::bind
