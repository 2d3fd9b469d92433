// The arena's allocator: first fit over whole pages. Buckets and staging buffers are few, large and long-lived, so a
// simple list is enough; what matters is that blocks come zeroed and that freed pages go back to the system.
//
// Transparent huge pages are left to the system's setting (/sys/kernel/mm/transparent_hugepage/shmem_enabled).
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <utility>

#include "base/error.h"
#include "transport/mapped/mapped.h"

namespace dcoll {
namespace {

// After this the pages read as zero. MADV_REMOVE punches a hole, for every process that maps them.
void give_back(std::byte* block, size_t bytes) {
  if (madvise(block, bytes, MADV_REMOVE) != 0) std::memset(block, 0, bytes);
}

}  // namespace

MappedWindow::MappedWindow(std::shared_ptr<const MappedWorld> world) : world_(std::move(world)) {
  if (arena_bytes() > 0) free_[0] = arena_bytes();
}

std::byte* MappedWindow::base(int local_rank) const {
  return world_->regions.at(static_cast<size_t>(local_rank))->base() + world_->layout.arena_offset;
}

BoardEntry& MappedWindow::board(int local_rank) {
  return world_->regions.at(static_cast<size_t>(local_rank))->header().board;
}

BoardEntry& MappedWindow::lane_board(int local_rank) {
  return world_->regions.at(static_cast<size_t>(local_rank))->header().lane_board;
}

void MappedWindow::notify_all() {
  for (int peer = 0; peer < local_size(); ++peer) {
    if (peer != local_rank()) world_->regions[static_cast<size_t>(peer)]->ring();
  }
}

ArrivalGroup& MappedWindow::group(int group) {
  return world_->header(groups().at(static_cast<size_t>(group)).front()).group;
}

void MappedWindow::release_groups(uint64_t ticket) {
  const int count = static_cast<int>(groups().size());
  // All before anybody is woken, which takes a system call and may cost this thread its core: by the end of a farewell
  // those that know go at once, and must not seem to have left the others behind.
  for (int g = 0; g < count; ++g) group(g).released.store(ticket, std::memory_order_seq_cst);
  for (int g = 0; g < count; ++g) {
    if (group(g).sleepers.load(std::memory_order_seq_cst) == 0) continue;
    for (const int member : groups()[static_cast<size_t>(g)]) {
      const Region& region = *world_->regions[static_cast<size_t>(member)];
      if (member == local_rank() || region.door().sleepers.load(std::memory_order_seq_cst) == 0) continue;
      region.ring();
    }
  }
}

std::byte* MappedWindow::alloc_region(size_t bytes) {
  {
    const MutexLock lock(mutex_);
    const auto [begin, end] = retired_.equal_range(bytes);
    for (auto found = begin; found != end; ++found) {
      std::byte* block = found->second;
      if (reinterpret_cast<RegionHeader*>(block)->users.load(std::memory_order_acquire) > 0) continue;
      retired_.erase(found);
      give_back(block, bytes);
      return block;
    }
  }
  return alloc(bytes);
}

void MappedWindow::retire_region(std::byte* block, size_t bytes) {
  const MutexLock lock(mutex_);
  try {
    retired_.emplace(bytes, block);
  } catch (const std::bad_alloc&) {  // its place in the arena is used no more
  }
}

std::byte* MappedWindow::alloc(size_t bytes) {
  const MutexLock lock(mutex_);
  size_t available = 0, largest = 0;
  if (bytes <= arena_bytes()) {  // guards the rounding against overflow
    const size_t need = std::max(round_up(bytes, page_bytes()), page_bytes());
    for (auto block = free_.begin(); block != free_.end(); ++block) {
      const auto [offset, length] = *block;
      if (length >= need) {
        in_use_.emplace(offset, need);
        auto rest = free_.extract(block);  // from here on nothing needs memory
        rest.key() = offset + need;
        rest.mapped() = length - need;
        if (length > need) free_.insert(std::move(rest));
        return base(local_rank()) + offset;
      }
    }
  }
  for (const auto& [offset, length] : free_) {
    available += length;
    largest = std::max(largest, length);
  }
  throw TransportError("no room for " + std::to_string(bytes) + " bytes in the arena of " +
                       std::to_string(arena_bytes()) + " bytes (" + std::to_string(available) +
                       " free, largest block " + std::to_string(largest) + "); raise DCOLL_ARENA_MB (now " +
                       std::to_string(arena_bytes() >> 20) + ")");
}

// A forked child lets go of its copies of the parent's tensors. The pages are the parent's and its peers' still, and
// what the child's maps say of them may be long out of date.
void MappedWindow::free(std::byte* block) {
  if (block == nullptr || fork_.in_child()) return;
  std::map<size_t, size_t>::node_type freed;  // which goes to the other list: what destructors do must not need memory
  {
    const MutexLock lock(mutex_);
    const uint64_t at = offset_of(block, 1);
    const auto found = at == kUnmapped ? in_use_.end() : in_use_.find(static_cast<size_t>(at));
    if (found == in_use_.end()) throw ArgumentError("free of a block that alloc of this arena did not return");
    freed = in_use_.extract(found);
  }
  size_t &offset = freed.key(), &length = freed.mapped();
  give_back(block, length);  // outside the lock, and before another alloc can find the block
  const MutexLock lock(mutex_);
  auto next = free_.lower_bound(offset);
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      length += previous->second;
      free_.erase(previous);
    }
  }
  if (next != free_.end() && offset + length == next->first) {
    length += next->second;
    free_.erase(next);
  }
  free_.insert(std::move(freed));
}

}  // namespace dcoll
