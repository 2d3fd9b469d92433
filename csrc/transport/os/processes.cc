#include "transport/os/processes.h"

#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"

namespace dcoll {

ProcessId own_process(uint64_t machine) {
  struct stat space{};
  if (stat("/proc/self/ns/pid", &space) != 0) return {};
  return {.machine = machine, .space = space.st_ino, .pid = getpid()};
}

Processes::Processes(const std::vector<ProcessId>& of_ranks, int own_rank) {
#ifdef SYS_pidfd_open
  const ProcessId& own = of_ranks[static_cast<size_t>(own_rank)];
  for (int rank = 0; rank < static_cast<int>(of_ranks.size()); ++rank) {
    const ProcessId& other = of_ranks[static_cast<size_t>(rank)];
    if (rank == own_rank || other.pid <= 0 || other.machine == 0) continue;
    if (other.machine != own.machine || other.space != own.space) continue;
    Fd process(static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(other.pid), 0)));
    if (process || errno == ESRCH) watched_.emplace(rank, std::move(process));
  }
#endif
}

void Processes::check(const std::vector<int>& ranks) const {
  for (const auto& [rank, process] : watched_) {
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) continue;
    pollfd end{process.get(), POLLIN, 0};
    if (process && (poll(&end, 1, 0) <= 0 || (end.revents & POLLIN) == 0)) continue;
    throw PeerError("rank " + std::to_string(rank) + " died: its process ended without closing its communicator");
  }
}

}  // namespace dcoll
