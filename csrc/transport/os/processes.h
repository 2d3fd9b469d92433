// The processes of the job's ranks, watched by the kernel: a rank that dies is noticed although MPI says nothing (its
// messages then simply never come). On this machine descriptors of processes (pidfd_open, Linux 5.3) become readable
// with the end; on others the kernel there closes a connection (lifelines.h).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "transport/os/fd.h"
#include "transport/os/lifelines.h"

namespace dcoll {

// A digest of the kernel's boot id, which containers and network namespaces of one machine share; 0: unknown.
uint64_t own_machine();
// The network namespace, in which abstract sockets are seen; 0: unknown.
uint64_t own_network();

// Exchanged between ranks at start-up, bytewise.
struct ProcessId {
  uint64_t machine = 0;  // own_machine()
  uint64_t space = 0;    // the namespace that the number belongs to: containers have their own
  int64_t pid = 0;
};
ProcessId own_process();
// Per rank: equal for those that can watch each other on this machine.
std::vector<int> watching_groups(const std::vector<ProcessId>& of_ranks);

// Readable once the process has ended; empty where the kernel has no pidfds or the process cannot be seen (ESRCH).
Fd open_pidfd(pid_t pid);
// What the kernel says of a process (proc(5), /proc/pid/stat): from its state on, which is 'T' while it is stopped.
// Empty: nothing.
std::vector<std::string> process_stat(int64_t pid);
// The processor time that a process has used, in seconds; none where that cannot be seen from here.
std::optional<double> processor_seconds(const ProcessId& process);

// Which ranks compute: those that have used the processor since they were looked at. One that hangs, waits or is
// stopped has not. Of ranks of other machines nothing is known: they are not at work.
class AtWork {
 public:
  explicit AtWork(std::vector<ProcessId> of_ranks) : of_ranks_(std::move(of_ranks)) {}
  void look();
  Clock::time_point looked() const { return looked_; }  // min(): never
  std::vector<int> among(const std::vector<int>& ranks) const;

 private:
  std::vector<ProcessId> of_ranks_;  // empty: none is known
  Clock::time_point looked_ = Clock::time_point::min();
  std::vector<std::optional<double>> used_{};  // seconds, then
};

class Processes {
 public:
  // By rank. Those that cannot be watched from here (another machine or container, an old kernel) are left to the
  // lifelines, if there are any.
  Processes(const std::vector<ProcessId>& of_ranks, int own_rank, std::unique_ptr<Lifelines> lifelines = nullptr);
  Processes() = default;
  void watch(int rank, const ProcessId& other);
  // Whether a rank that is watched has ended.
  bool ended(int rank) const;
  // Throws PeerError if one of these ranks' processes has ended. No system call where none is watched.
  void check(const std::vector<int>& ranks) const;

 private:
  std::map<int, Fd> watched_;  // by rank; an empty Fd: it had ended before it could be watched
  const std::unique_ptr<Lifelines> lifelines_;
};

}  // namespace dcoll
