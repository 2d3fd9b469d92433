#include "transport/bootstrap.h"

#include <algorithm>

#include "base/ranks_text.h"

namespace dcoll {

void Bootstrap::meet(const StartUp& start) {
  start_ = start;
  meeting_->meet(start_, ranks_below(static_cast<size_t>(size_)));
}

void Bootstrap::broadcast(void* data, size_t bytes, int root) {
  const std::vector<std::byte> all = all_gather(data, bytes);
  std::copy_n(all.data() + bytes * static_cast<size_t>(root), bytes, static_cast<std::byte*>(data));
}

}  // namespace dcoll
