// New tensors of torch that lie in one block of the core's memory, which lives as long as any of them: the results of a
// group where they were reduced. Making one takes a third of what an empty tensor of its own takes, and no copy.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>

#include "bind/operand.h"
#include "engine/core/memory.h"

namespace dcoll::bind {

class SharedResults {
 public:
  // Results share a block up to this size in all: whoever keeps one of them keeps as much.
  static constexpr size_t kMostBytes = size_t{1} << 20;

  // Room for so many tensors.
  SharedResults(std::shared_ptr<Memory> memory, size_t tensors);
  ~SharedResults();
  SharedResults(const SharedResults&) = delete;
  SharedResults& operator=(const SharedResults&) = delete;

  // One at `operand.data`, which is in the memory, by what maker_of() returned. Null: a Python error is set.
  PyObject* make(dlpack::FromManaged maker, const Operand& operand, const Shape& shape);

 private:
  struct Block;
  Block* block_;  // its own owner: freed with the last tensor
  size_t made_ = 0;
};

}  // namespace dcoll::bind
