#include "transport/os/processes.h"

#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <utility>

#include "base/error.h"
#include "base/hash.h"

namespace dcoll {

namespace {

// The number of one of this process's namespaces; 0: it cannot be told.
uint64_t own_namespace(const char* path) {
  struct stat space{};
  return stat(path, &space) == 0 ? space.st_ino : 0;
}

}  // namespace

uint64_t own_machine() {
  std::string boot;
  return std::ifstream("/proc/sys/kernel/random/boot_id") >> boot ? Fingerprint().add(boot).value() : 0;
}

uint64_t own_network() { return own_namespace("/proc/self/ns/net"); }

ProcessId own_process() {
  const uint64_t space = own_namespace("/proc/self/ns/pid");
  if (space == 0) return {};
  return {.machine = own_machine(), .space = space, .pid = getpid()};
}

Processes::Processes(const std::vector<ProcessId>& of_ranks, int own_rank) {
  for (int rank = 0; rank < static_cast<int>(of_ranks.size()); ++rank) {
    if (rank != own_rank) watch(rank, of_ranks[static_cast<size_t>(rank)]);
  }
}

void Processes::watch([[maybe_unused]] int rank, [[maybe_unused]] const ProcessId& other) {
#ifdef SYS_pidfd_open
  const ProcessId own = own_process();
  if (other.pid <= 0 || other.machine == 0) return;
  if (other.machine != own.machine || other.space != own.space) return;
  Fd process(static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(other.pid), 0)));
  if (process || errno == ESRCH) watched_.emplace(rank, std::move(process));
#endif
}

bool Processes::ended(int rank) const {
  const auto found = watched_.find(rank);
  if (found == watched_.end()) return false;
  pollfd end{found->second.get(), POLLIN, 0};
  return !found->second || (poll(&end, 1, 0) > 0 && (end.revents & POLLIN) != 0);
}

void Processes::check(const std::vector<int>& ranks) const {
  if (watched_.empty()) return;
  for (const int rank : ranks) {
    if (!ended(rank)) continue;
    throw PeerError("rank " + std::to_string(rank) + " died: its process ended without closing its communicator");
  }
}

}  // namespace dcoll
