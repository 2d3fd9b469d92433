// How many rounds of an optimizer's gradients have ended, well or not: what schedules of compression go by. Ranks
// compare what they send, so all are to be at the same place. One that was in a join() has missed rounds, one that has
// loaded a checkpoint has those of it, and one that is new in the job none. So the first round of a Reducer, and the
// first one after a join, begins with a call in which ranks agree on the most that any of them has.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "engine/communicator/communicator.h"
#include "engine/core/operation.h"

namespace dcoll {

class Rounds {
 public:
  // scheduled: whether something goes by it. If nothing does, ranks never agree. name: what that call is called.
  Rounds(std::shared_ptr<Communicator> comm, std::string name, bool scheduled)
      : comm_(std::move(comm)), name_(std::move(name)), scheduled_(scheduled) {}

  size_t ended() const { return ended_; }
  void set_ended(size_t rounds) { ended_ = rounds; }
  void end_one() { ++ended_; }

  // Whether other ranks may have another number: then agree() is the first call of this round, and the only one if it
  // fails, for what else is called may depend on the number. Alike on all ranks that take part.
  bool may_differ() const { return scheduled_ && agreed_after_ != comm_->joins(); }
  // `wait` throws what an operation failed with.
  void agree(const std::function<void(Operation&)>& wait);

  Communicator& communicator() const { return *comm_; }

 private:
  std::shared_ptr<Communicator> comm_;
  std::string name_;
  bool scheduled_;
  std::optional<size_t> agreed_after_{};  // so many joins
  size_t ended_ = 0;
};

}  // namespace dcoll
