#include "engine/core/scratch.h"

#include <algorithm>
#include <bit>
#include <new>
#include <utility>

#include "base/types.h"

namespace dcoll {
namespace {

// Powers of two, and eighths of one where that would be much, so that requests of about the same size meet the same
// blocks.
constexpr size_t kLeastBytes = 4096, kMuch = 1 << 20;
size_t block_bytes(size_t bytes) {
  if (bytes <= kMuch) return std::bit_ceil(std::max(bytes, kLeastBytes));
  return round_up(bytes, std::bit_floor(bytes) / 8);
}

}  // namespace

std::shared_ptr<Memory> Scratch::take(size_t bytes, const std::function<std::shared_ptr<Memory>(size_t)>& allocate) {
  std::shared_ptr<Memory> block = find(bytes);
  if (block == nullptr) block = allocate(block_bytes(bytes));
  Memory* memory = block.get();
  return {memory, [pool = weak_from_this(), block = std::move(block)](Memory*) mutable {
            if (const auto alive = pool.lock()) alive->put(std::move(block));
          }};
}

std::shared_ptr<Memory> Scratch::find(size_t bytes) {
  const MutexLock lock(mutex_);
  const auto fits = [&](const auto& block) {
    return block->bytes() >= bytes && block->bytes() <= std::bit_ceil(std::max(bytes, kLeastBytes));
  };
  const auto found = std::find_if(kept_.rbegin(), kept_.rend(), fits);
  if (found == kept_.rend()) return nullptr;
  auto block = std::move(*found);
  kept_.erase(std::prev(found.base()));
  kept_bytes_ -= block->bytes();
  return block;
}

void Scratch::put(std::shared_ptr<Memory> block) {
  const MutexLock lock(mutex_);
  const size_t bytes = block->bytes();
  try {
    kept_.push_back(std::move(block));
  } catch (const std::bad_alloc&) {
    return;
  }
  kept_bytes_ += bytes;
  while (kept_bytes_ > most_kept_bytes_ && !kept_.empty()) {
    kept_bytes_ -= kept_.front()->bytes();
    kept_.erase(kept_.begin());
  }
}

}  // namespace dcoll
