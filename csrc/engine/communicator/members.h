// What a communicator is made with: who is in it and how they are reached, and what it keeps of that.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/fork.h"
#include "base/log.h"
#include "base/settings.h"
#include "engine/communicator/driver.h"
#include "engine/core/operation.h"
#include "engine/core/staging.h"
#include "engine/links/link_constants.h"
#include "engine/watch/diagnosis.h"
#include "engine/watch/timeline.h"
#include "transport/endpoint.h"
#include "transport/os/processes.h"
#include "transport/transport.h"
#include "transport/window.h"

namespace dcoll {

// Messages in mapped memory, as the settings have them.
MappedOptions slots_of(const Settings& settings);

// Who is in a communicator and how they are reached.
struct Members {
  int rank = 0;
  int size = 1;
  std::vector<int> node_of_rank{0};
  std::vector<std::string> transport_of_rank{"self"};
  std::unique_ptr<Transport> transport;
  std::shared_ptr<Window> window;  // the node's memory; null when it could not be mapped
  LinkConstants links{};           // how the constants of the cost model are found
  // Ranks with equal numbers have mapped each other; empty where that is not known of all ranks. With several numbers,
  // collectives work on two levels, and every rank needs a window, if only its own.
  std::vector<int> memory_of_rank{};
  std::vector<int> job_ranks{};                  // what messages call the ranks; empty: by their numbers here
  std::shared_ptr<const Processes> processes{};  // of the job, where the transport does not see that one ends
  std::vector<ProcessId> process_of_rank{};      // empty: not known
  std::shared_ptr<Timeline> timeline{};          // of the process; null: a new one
  std::shared_ptr<Diagnosis> diagnosis{};        // of the process; null: this communicator makes it
  std::shared_ptr<Driver> driver{};              // of the process; null: a new one
  bool may_listen = true;     // whether a thread of its own may call the transport at any time, under the lock
  bool own_core = true;       // no other rank needs the core this one runs on, so it may spin while it waits
  bool shared_cores = false;  // that is not so of every rank of the job

  int job_rank(int of) const { return job_ranks.empty() ? of : job_ranks[of]; }
  std::vector<int> all_job_ranks() const;
  int node() const { return node_of_rank[rank]; }
  int local_rank() const;
  int local_size() const;
  int num_nodes() const;
};

// What the parts of a communicator work with. But for its lanes, which have a lock of their own, nothing of it changes
// once the communicator is made.
struct Setup {
  Setup(Members members, const Settings& settings);

  // What becomes of a call: of memory on a device, its copy begins. ArgumentError: see Request::validate.
  std::shared_ptr<Operation> operation_of(Request&& request) const;
  bool may_use_nccl() const;
  // See Communicator::alloc.
  std::shared_ptr<Memory> alloc(size_t bytes) const;
  // In a process that a rank forked: Error. To be asked before a lock is taken, for its copy in the child may be held,
  // by a thread that only the parent has.
  void check_process() const {
    if (fork.in_child()) [[unlikely]]
      throw_forked();
  }
  Transport& transport() const { return *members.transport; }
  Timeline& timeline() const { return *members.timeline; }
  int job_rank() const { return members.job_rank(members.rank); }

  Members members;  // but for the links, which are in Fabric then
  Settings settings;
  Log log;
  int number;                                 // in the timeline
  const std::atomic<uint32_t>* failure_flag;  // Transport::failure_flag
  ForkGuard fork;
  std::atomic<bool> told_uncompressed = false;  // Fabric::tell_uncompressed
  std::unique_ptr<StagingLanes> lanes;

 private:
  [[noreturn]] void throw_forked() const;
};

}  // namespace dcoll
