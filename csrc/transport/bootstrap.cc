#include "transport/bootstrap.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

namespace dcoll {

void Bootstrap::meet(const StartUp& start) {
  start_ = start;
  std::vector<int> everybody(static_cast<size_t>(size_));
  std::iota(everybody.begin(), everybody.end(), 0);
  meeting_->meet(start_, std::move(everybody));
}

void Bootstrap::broadcast(void* data, size_t bytes, int root) {
  const std::vector<std::byte> all = all_gather(data, bytes);
  std::copy_n(all.data() + bytes * static_cast<size_t>(root), bytes, static_cast<std::byte*>(data));
}

std::vector<int> numbered(const std::vector<uint64_t>& places) {
  std::map<uint64_t, int> numbers;
  std::vector<int> nodes;
  for (const uint64_t place : places) {
    nodes.push_back(numbers.try_emplace(place, static_cast<int>(numbers.size())).first->second);
  }
  return nodes;
}

}  // namespace dcoll
