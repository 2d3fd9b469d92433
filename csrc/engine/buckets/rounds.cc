#include "engine/buckets/rounds.h"

#include <cstdint>
#include <cstring>

#include "base/error.h"

namespace dcoll {

void Rounds::agree(const std::function<void(Operation&)>& wait) {
  const std::shared_ptr<Memory> most = Memory::plain(sizeof ended_);
  std::memcpy(most->data(), &ended_, sizeof ended_);
  static_assert(sizeof ended_ == sizeof(uint64_t));
  const auto operation = comm_->submit({.kind = Kind::kAllReduce,
                                        .in = most->data(),
                                        .out = most->data(),
                                        .count = 1,
                                        .dtype = DType::kUInt64,
                                        .op = ReduceOp::kMax,
                                        .name = name_},
                                       Communicator::Start::kByWaiter, most);
  agreed_after_ = comm_->joins();  // also where the wait is broken off: the others have agreed
  try {
    wait(*operation);
  } catch (const Error&) {
    agreed_after_.reset();
    throw;
  }
  std::memcpy(&ended_, most->data(), sizeof ended_);
}

}  // namespace dcoll
