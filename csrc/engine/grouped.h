// An all-reduce of many tensors as one: packed into one buffer per dtype, which peers can read, reduced there, and
// unpacked once all of it has succeeded. So a group is reduced as a whole or not at all.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/types.h"
#include "engine/communicator.h"
#include "kernels/pack.h"

namespace dcoll {

struct GroupTensor {
  void* in = nullptr;
  void* out = nullptr;  // may equal in
  size_t count = 0;     // elements
  DType dtype = DType::kFloat32;
};

// Not thread-safe: called by one thread at a time.
class GroupedAllReduce {
 public:
  // options: operator, factors and name of the whole; memory, count and dtype are not looked at.
  GroupedAllReduce(std::shared_ptr<Communicator> comm, const std::vector<GroupTensor>& tensors,
                   const ReduceCall& options);

  // Packs and submits.
  void start();
  // As start(), to meet the group of that name on the other ranks (named_lane.h): one operation per dtype.
  void start_by_name();
  // Packs and reduces on this thread where possible; `wait` waits for what is not done then.
  void run(const std::function<void(Operation&)>& wait);

  bool done() const;
  // Once all is done: throws the first failure, or unpacks. `wait` as above.
  void finish(const std::function<void(Operation&)>& wait);
  size_t bytes() const { return bytes_; }

 private:
  // The tensors of one dtype.
  struct Part {
    DType dtype = DType::kFloat32;
    std::vector<kernels::Segment> inputs, outputs;
    size_t bytes = 0;
    std::shared_ptr<Memory> memory;
    std::shared_ptr<Operation> operation;
  };

  // A new one gets room for so many tensors.
  Part& part_of(DType dtype, size_t tensors);
  void pack();
  ReduceCall call_of(const Part& part) const;
  Request request_of(const Part& part) const;
  Request request_by_name(const Part& part) const;

  const std::shared_ptr<Communicator> comm_;
  const ReduceOp op_;
  const double prescale_, postscale_;
  const std::string given_name_, tensors_, name_;
  std::vector<Part> parts_;
  size_t bytes_ = 0;
  bool unpacked_ = false;
};

}  // namespace dcoll
