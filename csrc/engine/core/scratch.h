// Blocks of memory that are taken and let go of again and again: kept, so that they need not be allocated, zeroed and
// paged in every time.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "base/thread_safety.h"
#include "engine/core/memory.h"

namespace dcoll {

class Scratch : public std::enable_shared_from_this<Scratch> {
 public:
  static constexpr size_t kMostKeptBytes = size_t{64} << 20;
  explicit Scratch(size_t most_kept_bytes = kMostKeptBytes) : most_kept_bytes_(most_kept_bytes) {}

  // At least `bytes`. It comes back when the last reference to it is gone; then the pool may be gone too.
  std::shared_ptr<Memory> take(size_t bytes, const std::function<std::shared_ptr<Memory>(size_t)>& allocate);

 private:
  std::shared_ptr<Memory> find(size_t bytes);
  void put(std::shared_ptr<Memory> block);

  const size_t most_kept_bytes_;
  Mutex mutex_;
  std::vector<std::shared_ptr<Memory>> kept_ DCOLL_GUARDED_BY(mutex_);  // the last to come back is the last
  size_t kept_bytes_ DCOLL_GUARDED_BY(mutex_) = 0;
};

}  // namespace dcoll
