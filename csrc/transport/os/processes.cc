#include "transport/os/processes.h"

#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>

#include "base/error.h"
#include "base/hash.h"
#include "base/ranks_text.h"

namespace dcoll {

namespace {

// The number of one of this process's namespaces; 0: it cannot be told.
uint64_t own_namespace(const char* path) {
  struct stat space{};
  return stat(path, &space) == 0 ? space.st_ino : 0;
}

// Whether its number means the same process here.
bool is_seen(const ProcessId& id) {
  if (id.pid <= 0 || id.machine == 0) return false;
  const ProcessId own = own_process();
  return id.machine == own.machine && id.space == own.space;
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

std::vector<int> watching_groups(const std::vector<ProcessId>& of_ranks) {
  std::vector<std::pair<uint64_t, uint64_t>> places;
  for (const ProcessId& id : of_ranks) {
    const bool known = id.machine != 0 && id.pid > 0;  // else it is alone
    places.emplace_back(known ? id.machine : 0, known ? id.space : places.size());
  }
  return numbered(places);
}

Fd open_pidfd([[maybe_unused]] pid_t pid) {
  errno = ENOSYS;
#ifdef SYS_pidfd_open
  if (pid > 0) return Fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
#endif
  return Fd();
}

std::vector<std::string> process_stat(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(')');  // a program's name may have any characters
  if (name_end == std::string::npos) return {};
  std::istringstream words(line.substr(name_end + 1));
  return {std::istream_iterator<std::string>(words), {}};
}

std::optional<double> processor_seconds(const ProcessId& process) {
  constexpr size_t kUser = 11, kSystem = 12;  // fields 14 and 15, counted from the state, which is the third
  if (!is_seen(process)) return std::nullopt;
  const std::vector<std::string> words = process_stat(process.pid);
  if (words.size() <= kSystem) return std::nullopt;
  const auto ticks = [&](size_t word) { return std::strtod(words[word].c_str(), nullptr); };
  return (ticks(kUser) + ticks(kSystem)) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

void AtWork::look() {
  looked_ = Clock::now();
  used_.clear();
  for (const ProcessId& process : of_ranks_) used_.push_back(processor_seconds(process));
}

std::vector<int> AtWork::among(const std::vector<int>& ranks) const {
  constexpr double kLeastShare = 0.01, kLeastSeconds = 0.02;  // two ticks, as the kernel counts
  if (used_.empty()) return {};
  const double least = std::max(kLeastShare * seconds_between(looked_, Clock::now()), kLeastSeconds);
  std::vector<int> at_work;
  for (const int rank : ranks) {
    const auto at = static_cast<size_t>(rank);
    const std::optional<double> before = used_[at], after = processor_seconds(of_ranks_[at]);
    if (before && after && *after - *before >= least) at_work.push_back(rank);
  }
  return at_work;
}

Processes::Processes(const std::vector<ProcessId>& of_ranks, int own_rank, std::unique_ptr<Lifelines> lifelines)
    : lifelines_(std::move(lifelines)) {
  for (int rank = 0; rank < static_cast<int>(of_ranks.size()); ++rank) {
    if (rank != own_rank) watch(rank, of_ranks[static_cast<size_t>(rank)]);
  }
}

void Processes::watch(int rank, const ProcessId& other) {
  if (!is_seen(other)) return;
  Fd process = open_pidfd(static_cast<pid_t>(other.pid));
  if (process || errno == ESRCH) watched_.emplace(rank, std::move(process));
}

bool Processes::ended(int rank) const {
  const auto found = watched_.find(rank);
  if (found == watched_.end()) return false;
  pollfd end{found->second.get(), POLLIN, 0};
  return !found->second || (poll(&end, 1, 0) > 0 && (end.revents & POLLIN) != 0);
}

void Processes::check(const std::vector<int>& ranks) const {
  const std::vector<int> cut_off = lifelines_ ? lifelines_->ended() : std::vector<int>{};
  if (watched_.empty() && cut_off.empty()) return;
  for (const int rank : ranks) {
    if (!ended(rank) && std::ranges::find(cut_off, rank) == cut_off.end()) continue;
    throw PeerError("rank " + std::to_string(rank) + " died: its process ended without closing its communicator");
  }
}

}  // namespace dcoll
