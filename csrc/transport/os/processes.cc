#include "transport/os/processes.h"

#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/error.h"

namespace dcoll {

ProcessId own_process(uint64_t machine) {
  struct stat space{};
  if (stat("/proc/self/ns/pid", &space) != 0) return {};
  return {.machine = machine, .space = space.st_ino, .pid = getpid()};
}

std::vector<int> watching_groups(const std::vector<ProcessId>& of_ranks) {
  std::map<std::pair<uint64_t, uint64_t>, int> numbers;
  std::vector<int> groups;
  for (const ProcessId& id : of_ranks) {
    const int next = static_cast<int>(groups.size());
    groups.push_back(id.machine == 0 || id.pid <= 0 ? next
                                                    : numbers.try_emplace({id.machine, id.space}, next).first->second);
  }
  return groups;
}

Processes::Processes(const std::vector<ProcessId>& of_ranks, int own_rank, std::unique_ptr<Lifelines> lifelines)
    : lifelines_(std::move(lifelines)) {
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
  std::vector<int> ended = lifelines_ ? lifelines_->ended() : std::vector<int>{};
  for (const auto& [rank, process] : watched_) {
    pollfd end{process.get(), POLLIN, 0};
    if (!process || (poll(&end, 1, 0) > 0 && (end.revents & POLLIN) != 0)) ended.push_back(rank);
  }
  for (const int rank : ended) {
    if (std::ranges::find(ranks, rank) == ranks.end()) continue;
    throw PeerError("rank " + std::to_string(rank) + " died: its process ended without closing its communicator");
  }
}

}  // namespace dcoll
