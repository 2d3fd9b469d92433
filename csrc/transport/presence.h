// Which of the job's processes on this machine are in init(), known before there is MPI to ask, and which have ended.
// Each binds an abstract Unix socket whose name tells its rank and pid; nobody connects to it. The others read the
// list of names, which the kernel keeps: it has no entry of a process that ended. Who misses one that was there, or is
// told that one ended, leaves a name that says so, for the others and those that begin later. It serves messages alone.
#pragma once

#include <sys/types.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "transport/os/fd.h"

namespace dcoll {

// What the launcher's environment tells of this process.
struct LaunchedAs {
  std::string job;  // names this job on this machine, the same in all its processes
  int rank = 0;
  int size = 1;
  int local_size = 1;

  // None where it tells too little.
  static std::optional<LaunchedAs> from_env();
};

// "rank 1 died: its process has ended.".
std::string ended_text(const std::vector<int>& ranks);

class Presence {
 public:
  explicit Presence(std::optional<LaunchedAs> who);

  // "rank 1 has not called dcoll.init(), or has ended", as far as it can be told. Looks anew. elsewhere: of all
  // machines the ranks that are not there, where somebody can tell.
  std::string missing(const std::optional<std::vector<int>>& elsewhere = std::nullopt);
  int size() const { return who_ ? who_->size : 1; }
  bool on_one_machine() const { return !who_ || who_->local_size == who_->size; }
  // Ranks that this process or another one has seen and that have ended since. Looks anew.
  std::vector<int> ended();
  // These have ended, here or on other machines; the others of this machine see it.
  void tell(const std::vector<int>& ended);
  // Of those present the lowest, which speaks for all.
  bool speaks() const { return !who_ || lowest_ >= who_->rank; }

 private:
  Fd leave(const std::string& prefix, int rank) const;
  std::map<int, pid_t> look();

  const std::optional<LaunchedAs> who_;
  std::string here_, missed_;  // what names begin with that tell of ranks that are here, or that somebody misses
  Fd socket_;
  std::map<int, pid_t> seen_;  // ever
  int lowest_ = 0;             // of those present
  std::map<int, Fd> told_;     // what this process told of those it misses
  std::vector<int> missed_by_others_;
};

}  // namespace dcoll
