// What a communicator knows of its links, and where that is from. It is learnt by learn_constants() (collective/).
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "base/log.h"
#include "base/settings.h"
#include "base/thread_safety.h"
#include "engine/links/calibration_cache.h"
#include "transport/bootstrap.h"

namespace dcoll {

// What a communicator has learnt of its links, for who shares them. Any thread, whatever it has locked.
class KnownLinks {
 public:
  void set(const plan::Constants& constants) {
    const MutexLock lock(mutex_);
    constants_ = constants;
  }
  std::optional<plan::Constants> get() const {
    const MutexLock lock(mutex_);
    return constants_;
  }

 private:
  mutable Mutex mutex_;
  std::optional<plan::Constants> constants_ DCOLL_GUARDED_BY(mutex_);
};

struct LinkConstants {
  enum class Use { kCacheOrMeasure, kAlwaysMeasure, kBuiltIn };
  Use use = Use::kBuiltIn;
  bool learnt = false;      // nothing is left to ask for
  bool may_measure = true;  // false: until somebody else has, the constants are the built-in ones
  // Calls until that is asked again, and after that in vain: twice as many.
  uint64_t until_asked = 0, patience = 1;
  CalibrationCache cache;
  Log log;
  std::string source = "built in";  // "measured in 61 ms", "/home/u/.cache/dcoll/constants-1f.txt", "the job's"
  // A process set reads what the job has learnt: what its first rank knows then counts for all of its ranks, and if
  // that is nothing it measures its own links.
  std::shared_ptr<KnownLinks> of_the_job = std::make_shared<KnownLinks>();
  // Where this communicator writes what it has learnt, for its operations by name. The job: where process sets read.
  std::shared_ptr<KnownLinks> known = of_the_job;

  // The same for another sequence of operations of the same ranks, which has learnt nothing yet. It must not take over
  // what the first has learnt: ranks make it at different times, and would choose differently.
  LinkConstants of_a_sequence() const;
};

// What a world, or a process set, of several nodes uses.
LinkConstants link_constants(Bootstrap& ranks, const std::vector<int>& node_of_rank, const Settings& settings, Log log);

}  // namespace dcoll
