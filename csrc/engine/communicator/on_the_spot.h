// Collectives that are finished on the caller's thread, without a queue, a coroutine or another thread. Where peers are
// late, the ordinary way takes over from whatever was reached.
#pragma once

#include <memory>

#include "engine/communicator/progress.h"
#include "engine/communicator/turns.h"

namespace dcoll {

class OnTheSpot {
 public:
  OnTheSpot(const Setup& setup, Progress& progress, Turns& turns) : setup_(setup), progress_(progress), turns_(turns) {}

  // Makes the call, if it may be made here and now. `rest`: what is left of it, under way; null where it is done.
  bool run(const Call& call, std::shared_ptr<Operation>& rest) DCOLL_EXCLUDES(progress_.drive_mutex);
  // The same, with the outcome in `operation`, done or not. Not an all-reduce.
  bool run(Request& request, std::shared_ptr<Operation>& operation) DCOLL_EXCLUDES(progress_.drive_mutex);

 private:
  bool takes(const Call& call) DCOLL_REQUIRES(progress_.drive_mutex);
  std::shared_ptr<Operation> reduce(const Call& call) DCOLL_REQUIRES(progress_.drive_mutex);
  std::shared_ptr<Operation> pull(const Call& call) DCOLL_REQUIRES(progress_.drive_mutex);
  void pull(const std::shared_ptr<Operation>& operation) DCOLL_REQUIRES(progress_.drive_mutex);
  void go_on_briefly(const std::shared_ptr<Operation>& operation, const PullNow& pull)
      DCOLL_REQUIRES(progress_.drive_mutex);

  const Setup& setup_;
  Progress& progress_;
  Turns& turns_;
};

}  // namespace dcoll
