#include "device/arena.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "base/types.h"

namespace dcoll::device {
namespace {

// Never destroyed: tensors are let go of late.
struct All {
  Mutex mutex;
  std::map<int, std::unique_ptr<Arena>> arenas DCOLL_GUARDED_BY(mutex);
  Mutex segments_mutex;
  std::vector<Segment> segments DCOLL_GUARDED_BY(segments_mutex);

  static All& get() {
    static auto* all = new All;
    return *all;
  }
};

}  // namespace

Arena& arena_of(int number) {
  All& all = All::get();
  const MutexLock lock(all.mutex);
  std::unique_ptr<Arena>& arena = all.arenas[number];
  if (arena == nullptr) arena = std::make_unique<Arena>(number);
  return *arena;
}

std::optional<Segment> segment_at(size_t number) {
  All& all = All::get();
  const MutexLock lock(all.segments_mutex);
  if (number >= all.segments.size()) return std::nullopt;
  return all.segments[number];
}

std::optional<Place> place_of(const void* data, size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(data);
  All& all = All::get();
  const MutexLock lock(all.segments_mutex);
  for (size_t i = 0; i < all.segments.size(); ++i) {
    const Segment& segment = all.segments[i];
    if (begin < segment.data || begin >= segment.data + segment.bytes) continue;
    const auto offset = static_cast<size_t>(begin - segment.data);
    if (bytes > segment.bytes - offset) return std::nullopt;
    return Place{i, offset};
  }
  return std::nullopt;
}

namespace {

// Segments that the device has put side by side are apart to other processes.
bool in_one_segment(const std::byte* a, const std::byte* b) {
  const std::optional<Place> one = place_of(a, 1), other = place_of(b, 1);
  return one && other && one->segment == other->segment;
}

// Joins a block with those before and behind it.
void put(std::map<std::byte*, size_t>& blocks, std::map<std::byte*, size_t>::node_type block) {
  auto next = blocks.lower_bound(block.key());
  if (next != blocks.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == block.key() && in_one_segment(previous->first, block.key())) {
      const size_t length = previous->second + block.mapped();
      block.key() = previous->first;
      block.mapped() = length;
      blocks.erase(previous);
    }
  }
  if (next != blocks.end() && block.key() + block.mapped() == next->first && in_one_segment(block.key(), next->first)) {
    block.mapped() += next->second;
    blocks.erase(next);
  }
  blocks.insert(std::move(block));
}

// Of nothing too, so that each block has an address of its own.
size_t length_of(size_t bytes) { return round_up(std::max<size_t>(bytes, 1), Arena::kAlignment); }

}  // namespace

std::byte* Arena::find(size_t length) {
  const auto found = std::ranges::find_if(idle_, [&](const auto& block) { return block.second >= length; });
  if (found == idle_.end()) return nullptr;
  const auto [data, all] = *found;
  in_use_.emplace(data, length);
  auto rest = idle_.extract(found);
  rest.key() = data + length;
  rest.mapped() = all - length;
  if (all > length) idle_.insert(std::move(rest));
  return data;
}

void Arena::add_segment(size_t length) {
  constexpr size_t kPage = size_t{2} << 20;
  const size_t bytes = round_up(std::max(kSegmentBytes, length), kPage);
  Segment made{number_, static_cast<std::byte*>(device_.allocate(bytes)), bytes, std::nullopt, {}};
  try {
    made.handle = device_.handle_of(made.data);
  } catch (const DeviceError& e) {  // whoever reduces over it finds out, and says so
    made.why = e.what();
  }
  All& all = All::get();
  {
    const MutexLock lock(all.segments_mutex);
    all.segments.push_back(made);
  }
  const MutexLock lock(mutex_);
  idle_.emplace(made.data, bytes);
}

std::unique_ptr<Block> Arena::alloc(size_t bytes) {
  const size_t length = length_of(bytes);
  for (;;) {
    {
      const MutexLock lock(mutex_);
      if (std::byte* const data = find(length)) return block(data, bytes);
    }
    add_segment(length);  // which another thread may take first
  }
}

std::unique_ptr<Block> Arena::alloc_or_wait(size_t bytes) {
  Blocks waiting;
  {
    const MutexLock lock(mutex_);
    if (std::byte* const data = find(length_of(bytes))) return block(data, bytes);
    waiting.swap(freed_);
  }
  const auto move_to = [&](Blocks& blocks) {
    while (!waiting.empty()) put(blocks, waiting.extract(waiting.begin()));
  };
  try {
    if (!waiting.empty()) device_.wait_for_all();
  } catch (const DeviceError&) {
    const MutexLock lock(mutex_);
    move_to(freed_);
    throw;
  }
  {
    const MutexLock lock(mutex_);
    move_to(idle_);
  }
  return alloc(bytes);
}

void Arena::free(std::byte* data, bool idle) noexcept {
  if (fork_.in_child()) return;  // the lock may be held by a thread that only the parent has
  const MutexLock lock(mutex_);
  auto block = in_use_.extract(data);
  if (!block.empty()) put(idle ? idle_ : freed_, std::move(block));
}

Block::~Block() { arena_.free(data_, idle_); }

}  // namespace dcoll::device
