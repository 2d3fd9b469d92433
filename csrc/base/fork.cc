#include "base/fork.h"

#include <pthread.h>

namespace dcoll {

std::atomic<uint32_t> ForkGuard::forks_{0};

ForkGuard::ForkGuard() : made_after_(forks_.load(std::memory_order_relaxed)) {
  // Once per process. It fails for want of memory alone; children would be unguarded then.
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { forks_.fetch_add(1, std::memory_order_relaxed); });
}

}  // namespace dcoll
