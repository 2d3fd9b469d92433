// What Open MPI's launcher knows of the processes of this job, on all hosts: which of them have ended, and which have
// said that they are here. It is asked through PMIx, which MPI's library brings: PMIx_Query_info, PMIx_Publish and
// PMIx_Lookup of the PMIx Standard.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "transport/start_up.h"

namespace dcoll::mpi {

// One thread at a time.
class Launcher {
 public:
  Launcher();
  // World ranks that were known to have ended when the launcher was last asked, or that are `told`: of these, ranks of
  // other hosts hear as well. It is asked once a second, where somebody waits for longer; its answer is not waited for.
  std::vector<int> ended(const std::vector<int>& told);
  // That this process waits in init(), for others to hear. Nobody needs to know where that takes less than a second.
  void say_here();
  // Of `size` world ranks those that have not said so; nullopt: it cannot be told. Takes two seconds at most.
  std::optional<std::vector<int>> absent(int size) const;
  // Before PMIx ends: a question that is under way is waited for, a second at most.
  void rest() const;
  // This process ends, and counts as one that ended well.
  void say_farewell() const;

 private:
  struct Answer;

  std::shared_ptr<Answer> answer_;  // empty: there is nobody to ask
  std::optional<Aside> asking_;
  Clock::time_point called_{}, asked_{}, waits_since_{};
  bool said_here_ = false;
};

}  // namespace dcoll::mpi
