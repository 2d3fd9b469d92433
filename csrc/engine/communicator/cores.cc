#include "engine/communicator/cores.h"

#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <thread>

#include "base/number.h"
#include "transport/os/processes.h"

namespace dcoll {
namespace {

// Ranks matched to cores, as many as possible, by augmenting paths (Kuhn's algorithm). If some rank is left over, then
// exactly the ranks on alternating paths from left-over ranks are those that lack a core in some placement
// (Dulmage and Mendelsohn, "Coverings of bipartite graphs", 1958).
class Placement {
 public:
  explicit Placement(std::span<const CoreClaim> claims) : claims_(claims), rank_on_(CPU_SETSIZE, kNobody) {
    for (size_t rank = 0; rank < claims.size(); ++rank) {
      reached_.assign(CPU_SETSIZE, false);
      if (!place(static_cast<int>(rank))) left_over_.push_back(static_cast<int>(rank));
    }
  }

  std::vector<bool> crowded() const {
    std::vector<bool> crowded(claims_.size());
    std::vector<int> todo = left_over_;
    for (const int rank : todo) crowded[static_cast<size_t>(rank)] = true;
    while (!todo.empty()) {
      const cpu_set_t& cores = claims_[static_cast<size_t>(todo.back())].cores;
      todo.pop_back();
      for (size_t core = 0; core < CPU_SETSIZE; ++core) {
        const int other = rank_on_[core];
        if (!CPU_ISSET(core, &cores) || other == kNobody || crowded[static_cast<size_t>(other)]) continue;
        crowded[static_cast<size_t>(other)] = true;
        todo.push_back(other);
      }
    }
    return crowded;
  }

 private:
  static constexpr int kNobody = -1;

  bool place(int rank) {
    for (size_t core = 0; core < CPU_SETSIZE; ++core) {
      if (!CPU_ISSET(core, &claims_[static_cast<size_t>(rank)].cores) || reached_[core]) continue;
      reached_[core] = true;
      if (rank_on_[core] == kNobody || place(rank_on_[core])) {
        rank_on_[core] = rank;
        return true;
      }
    }
    return false;
  }

  std::span<const CoreClaim> claims_;
  std::vector<int> rank_on_;    // by core
  std::vector<bool> reached_;   // by core, by the search under way
  std::vector<int> left_over_;  // ranks
};

}  // namespace

void read_cpu_quota(const std::string& root, const std::string& group, CoreClaim& claim) {
  std::string path = root + group;
  for (;;) {
    while (path.size() > root.size() && path.back() == '/') path.pop_back();
    std::ifstream file(path + "/cpu.max");
    std::string quota;
    double period_us = 0;
    struct stat info{};
    // "max 100000" is no limit, and no number.
    if (file >> quota >> period_us && quota != "max" && period_us > 0 && stat(path.c_str(), &info) == 0) {
      const double cores = number_from(quota).value_or(0) / period_us;
      if (cores > 0 && (claim.quota_id == 0 || cores < claim.quota_cores)) {
        claim.quota_id = static_cast<uint64_t>(info.st_ino);
        claim.quota_cores = cores;
      }
    }
    if (path.size() <= root.size()) return;
    path.resize(path.rfind('/'));
  }
}

CoreClaim own_core_claim() {
  CoreClaim claim;
  CPU_ZERO(&claim.cores);
  if (sched_getaffinity(0, sizeof claim.cores, &claim.cores) != 0 || CPU_COUNT(&claim.cores) == 0) {
    // More cores than the mask has room for: the first so many stand for all.
    for (unsigned core = 0; core < std::min(std::thread::hardware_concurrency(), unsigned{CPU_SETSIZE}); ++core) {
      CPU_SET(core, &claim.cores);
    }
  }
  claim.machine = own_machine();
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (line.starts_with("0::")) read_cpu_quota("/sys/fs/cgroup", line.substr(3), claim);
  }
  return claim;
}

std::vector<bool> own_core(std::span<const CoreClaim> claims) {
  std::vector<bool> own = Placement(claims).crowded();
  own.flip();
  std::map<uint64_t, int> ranks_under;
  for (const CoreClaim& claim : claims) ++ranks_under[claim.quota_id];
  for (size_t rank = 0; rank < claims.size(); ++rank) {
    const CoreClaim& claim = claims[rank];
    if (claim.quota_id != 0 && ranks_under[claim.quota_id] > claim.quota_cores) own[rank] = false;
  }
  return own;
}

bool Interruptions::look(int64_t switches, Clock::time_point now) {
  const double window_s = seconds_between(since_, now);
  if (window_s < kWindowSeconds) return frequent_;
  const bool first = since_ == Clock::time_point{};  // there is nothing to compare with
  frequent_ = !first && static_cast<double>(switches - switches_) > kMostPerSecond * window_s;
  since_ = now;
  switches_ = switches;
  return frequent_;
}

bool Interruptions::are_frequent(Clock::time_point now) {
  thread_local Interruptions own;
  if (seconds_between(own.since_, now) < kWindowSeconds) return own.frequent_;
  rusage usage{};
  if (getrusage(RUSAGE_THREAD, &usage) != 0) return false;
  return own.look(usage.ru_nivcsw, now);
}

std::string bind_this_thread(int core) {
  if (core >= CPU_SETSIZE) return "there are " + std::to_string(CPU_SETSIZE) + " at most";
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(core, &only);
  return sched_setaffinity(0, sizeof only, &only) == 0 ? "" : std::strerror(errno);
}

}  // namespace dcoll
