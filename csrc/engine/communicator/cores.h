// Whether a rank that waits may spin: only while it takes no core from a rank that works.
#pragma once

#include <sched.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"

namespace dcoll {

// The cores one rank may run on. Plain data: ranks show it to each other when they join.
struct CoreClaim {
  cpu_set_t cores;         // affinity mask
  uint64_t machine = 0;    // whose cores (own_machine())
  uint64_t quota_id = 0;   // the control group whose CPU quota binds tightest, 0: none
  double quota_cores = 0;  // its quota, in cores; shared by the ranks with the same quota_id
};

// Of the calling thread.
CoreClaim own_core_claim();

// Binds the calling thread to one core. The reason why not; empty: done.
std::string bind_this_thread(int core);

// By rank: whether it has a core to itself however the others are placed. A rank has none when some set of ranks it
// belongs to may run on fewer cores than the set has ranks (two ranks bound to one core, four unbound ones on two), or
// when its control group may use fewer cores than it has ranks.
std::vector<bool> own_core(std::span<const CoreClaim> claims);

// Whether something else runs on a thread's core: a program of nobody's job, that the masks above do not show. Then the
// scheduler takes the core away from the thread again and again, and a thread that spins uses up the share that it
// needs to compute. Counts how often that happens.
class Interruptions {
 public:
  // switches: how often the core was taken from the thread so far. What is returned holds for one kWindowSeconds.
  bool look(int64_t switches, Clock::time_point now);
  // Of the calling thread.
  static bool are_frequent(Clock::time_point now);

  static constexpr double kWindowSeconds = 0.05;
  static constexpr double kMostPerSecond = 30;

 private:
  Clock::time_point since_{};
  int64_t switches_ = 0;
  bool frequent_ = false;
};

// The tightest quota on the way from `group` ("/a/b") up to the root of the hierarchy mounted at `root`.
void read_cpu_quota(const std::string& root, const std::string& group, CoreClaim& claim);

}  // namespace dcoll
