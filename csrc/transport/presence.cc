#include "transport/presence.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <set>

#include "base/hash.h"
#include "base/ranks_text.h"
#include "transport/os/processes.h"

namespace dcoll {
namespace {

std::optional<int> number(const char* variable) {
  const char* text = std::getenv(variable);
  if (text == nullptr) return std::nullopt;
  int value = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, value);
  if (error != std::errc() || stop != end || value < 0) return std::nullopt;
  return value;
}

std::optional<int> first_number(std::initializer_list<const char*> variables) {
  for (const char* variable : variables) {
    if (const auto found = number(variable)) return found;
  }
  return std::nullopt;
}

bool is_stopped(pid_t pid) {
  const std::vector<std::string> stat = process_stat(pid);
  return !stat.empty() && stat.front() == "T";
}

}  // namespace

std::optional<LaunchedAs> LaunchedAs::from_env() {
  const auto rank = first_number({"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"});
  const auto size = first_number({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"});
  const auto local = first_number({"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"});
  std::string job;
  for (const char* variable : {"PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID"}) {
    if (const char* value = std::getenv(variable)) job += std::string(value) + "/";
  }
  if (!rank || !size || job.empty() || *rank >= *size) return std::nullopt;
  return LaunchedAs{.job = job, .rank = *rank, .size = *size, .local_size = local.value_or(0)};
}

std::string ended_text(const std::vector<int>& ranks) {
  return ranks_text(ranks) + " died: " + (ranks.size() == 1 ? "its process has" : "their processes have") + " ended.";
}

Presence::Presence(std::optional<LaunchedAs> who) : who_(std::move(who)) {
  if (!who_) return;
  const Fingerprint job = Fingerprint().add(who_->job).add(static_cast<uint64_t>(geteuid())).add(own_process().space);
  here_ = "@dcoll-here-" + hex(job.value()) + "-";
  missed_ = "@dcoll-missed-" + hex(job.value()) + "-";
  // Without it the others say that this rank is missing, should they have to say anything.
  socket_ = leave(here_, who_->rank);
}

// A name that tells of `rank`, for as long as this process lives; none if the kernel has no socket to give.
Fd Presence::leave(const std::string& prefix, int rank) const {
  const std::string name = prefix.substr(1) + std::to_string(rank) + "-" + std::to_string(getpid());
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  Fd made(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (made && bind(made.get(), reinterpret_cast<const sockaddr*>(&address), bytes) != 0) made.reset();
  return made;
}

std::map<int, pid_t> Presence::look() {
  std::map<int, pid_t> found;
  missed_by_others_.clear();
  if (!who_) return found;
  std::ifstream sockets("/proc/net/unix");
  if (!sockets.is_open()) return seen_;  // no descriptor is left: nothing new is known
  for (std::string line; std::getline(sockets, line);) {
    const size_t here = line.find(here_);
    const bool is_here = here != std::string::npos;
    const size_t at = is_here ? here : line.find(missed_);
    if (at == std::string::npos) continue;
    const char* text = line.data() + at + (is_here ? here_ : missed_).size();
    const char* end = line.data() + line.size();
    int rank = 0;
    pid_t pid = 0;
    const auto [dash, error] = std::from_chars(text, end, rank);
    if (error != std::errc() || dash == end || std::from_chars(dash + 1, end, pid).ec != std::errc()) continue;
    struct stat owner{};  // anybody can choose such a name
    if (rank < 0 || rank >= who_->size || stat(("/proc/" + std::to_string(pid)).c_str(), &owner) != 0) continue;
    if (owner.st_uid != geteuid()) continue;
    if (is_here) {
      found[rank] = pid;
    } else {
      missed_by_others_.push_back(rank);
    }
  }
  for (const auto& [rank, pid] : found) seen_[rank] = pid;
  lowest_ = found.empty() ? who_->rank : found.begin()->first;
  return found;
}

std::vector<int> Presence::ended() {
  std::map<int, pid_t> now = look();
  // The kernel lists sockets piece by piece, and may pass one over when another goes meanwhile.
  if (now.size() < seen_.size()) now.merge(look());
  std::set<int> ranks;
  for (const auto& [rank, pid] : seen_) {
    if (!now.contains(rank)) ranks.insert(rank);
  }
  tell({ranks.begin(), ranks.end()});
  for (const int rank : missed_by_others_) {
    if (!now.contains(rank)) ranks.insert(rank);
  }
  return {ranks.begin(), ranks.end()};
}

void Presence::tell(const std::vector<int>& ended) {
  for (const int rank : ended) {
    if (who_ && !told_.contains(rank)) told_[rank] = leave(missed_, rank);
  }
}

std::string Presence::missing(const std::optional<std::vector<int>>& elsewhere) {
  const std::map<int, pid_t> now = look();
  if (!now.contains(who_ ? who_->rank : 0)) {
    return "some ranks have not called dcoll.init(), or have ended; which ones cannot be told before MPI is up";
  }
  std::vector<int> here, absent;
  std::string stopped;
  for (int rank = 0; rank < who_->size; ++rank) (now.contains(rank) ? here : absent).push_back(rank);
  for (const auto& [rank, pid] : now) {
    if (is_stopped(pid)) stopped += ", rank " + std::to_string(rank) + " (pid " + std::to_string(pid) + ") is stopped";
  }
  if (elsewhere)
    std::erase_if(absent, [&](int rank) { return std::ranges::find(*elsewhere, rank) == elsewhere->end(); });
  if (absent.empty()) {
    return stopped.empty() ? "all ranks have called dcoll.init(), but MPI's start-up does not return"
                           : stopped.substr(2);
  }
  if (on_one_machine() || elsewhere) {
    const std::string have = absent.size() == 1 ? " has" : " have";
    return ranks_text(absent) + have + " not called dcoll.init(), or" + have + " ended" +
           (elsewhere ? " or got stuck in it" : "") + stopped;
  }
  return "of the " + std::to_string(who_->local_size) + " ranks of this node " + ranks_text(here) +
         (here.size() == 1 ? " has" : " have") + " called dcoll.init()" + stopped +
         (static_cast<int>(here.size()) < who_->local_size ? "; the others have not, or have ended"
                                                           : "; ranks of other nodes have not, or have ended");
}

}  // namespace dcoll
