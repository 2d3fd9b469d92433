// Whether this process is the one that an object was made in. A forked child (a data loader's worker, say) has copies
// of its parent's objects and shares its mappings and sockets, but is none of the job's ranks: what it did there, the
// parent and its peers would take for the parent's doing.
#pragma once

#include <atomic>
#include <cstdint>

namespace dcoll {

class ForkGuard {
 public:
  ForkGuard();  // of the process it is made in
  // Whether this is another process than that. No system call.
  bool in_child() const { return forks_.load(std::memory_order_relaxed) != made_after_; }

 private:
  static std::atomic<uint32_t> forks_;  // between the process that loaded this library and this one
  uint32_t made_after_;
};

}  // namespace dcoll
