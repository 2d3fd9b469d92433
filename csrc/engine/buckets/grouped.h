// An all-reduce of many tensors as one: packed into one buffer per dtype, which peers can read, reduced there, and
// unpacked once all of it has succeeded. So ranks that call different groups change none of their tensors.
//
// What no peer reads is not packed: in the two-shot form, the slice that this rank reduces is read from the tensors
// and, for one dtype in place, written to them. And what may stay in the buffer is not unpacked: new results can be
// tensors of that memory.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/thread_safety.h"
#include "base/types.h"
#include "engine/communicator/communicator.h"
#include "kernels/pack.h"

namespace dcoll {

struct GroupTensor {
  void* in = nullptr;
  void* out = nullptr;  // may equal in; null: the result stays in the buffer, see memory_of()
  size_t count = 0;     // elements
  DType dtype = DType::kFloat32;
  Dims dims{};
};

// Called by one thread at a time, but where it says otherwise.
class GroupedAllReduce {
 public:
  // kNow: the tensors stay as they are until run() is done, so those that only this rank reads need not be copied.
  enum class Submit { kNow, kLater };

  // options: operator, factors and name of the whole; memory, count and dtype are not looked at.
  GroupedAllReduce(std::shared_ptr<Communicator> comm, const std::vector<GroupTensor>& tensors, const Call& options);

  // What run() or start() begins with. Between the two, the memory in which the tensors of a dtype will be, one after
  // the other as they came, is known.
  void pack(Submit how);
  const std::shared_ptr<Memory>& memory_of(DType dtype) { return part_of(dtype, 0).memory; }

  // Submits. By name: to meet the group of that name on the other ranks (named_lane.h): one operation per dtype.
  void start(bool by_name);
  // Reduces on this thread where possible; `wait` waits for what is not done then.
  void run(const std::function<void(Operation&)>& wait);
  // After run() has thrown: whether an operation goes on, and with it the use of the tensors.
  bool in_flight() const;

  bool done() const;
  // After start(): waits for all of it, as above; then the results are taken out, once. Several threads may do both.
  void wait_for(const std::function<void(Operation&)>& wait) const;
  void unpack();
  size_t bytes() const { return bytes_; }

 private:
  // The tensors of one dtype.
  struct Part {
    DType dtype = DType::kFloat32;
    std::vector<kernels::Segment> inputs, outputs;
    size_t bytes = 0;
    std::shared_ptr<Memory> memory;
    Span own{};                 // read from the tensors; empty: all is packed
    bool into_tensors = false;  // written to them, too
    std::shared_ptr<Operation> operation;
  };

  // A new one gets room for so many tensors.
  Part& part_of(DType dtype, size_t tensors);
  void pack_others(Part& part);
  void unpack(const Part& part);
  Call call_of(const Part& part) const;
  Request request_of(const Part& part) const;
  Request request_by_name(const Part& part) const;

  const std::shared_ptr<Communicator> comm_;
  const Call options_;  // but for its name
  const std::string given_name_, tensors_, name_;
  std::vector<Part> parts_;
  size_t bytes_ = 0;
  Mutex unpack_mutex_;
  bool unpacked_ DCOLL_GUARDED_BY(unpack_mutex_) = false;
};

}  // namespace dcoll
