#include "engine/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>

namespace dcoll {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kLargestKept = size_t{64} << 20;

struct Block {
  std::byte* data = nullptr;
  size_t capacity = 0;
};

size_t alignment_of(size_t capacity) { return capacity >= kHugePage ? kHugePage : Memory::kAlignment; }

void release(Block block) {
  if (block.data != nullptr) ::operator delete(block.data, std::align_val_t{alignment_of(block.capacity)});
}

// The last large block that was freed, for the next that is about as large. Never destroyed: a block may be freed later
// than static objects.
class Spare {
 public:
  static Spare& get() {
    static auto* spare = new Spare();
    return *spare;
  }
  Block take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (kept_.capacity < bytes || kept_.capacity > 2 * bytes) return {};
    return std::exchange(kept_, {});
  }
  void keep(Block block) {
    {
      const std::lock_guard lock(mutex_);
      std::swap(kept_, block);
    }
    release(block);
  }

 private:
  std::mutex mutex_;
  Block kept_;
};

Block allocate(size_t bytes) {
  const size_t capacity =
      bytes < kHugePage ? std::max<size_t>(bytes, 1) : (bytes + kHugePage - 1) / kHugePage * kHugePage;
  auto* data = static_cast<std::byte*>(::operator new(capacity, std::align_val_t{alignment_of(capacity)}));
  if (capacity >= kHugePage) madvise(data, capacity, MADV_HUGEPAGE);  // refused: small pages, no harm
  return {data, capacity};
}

}  // namespace

std::shared_ptr<Memory> Memory::mapped(std::shared_ptr<Window> window, size_t bytes) {
  std::byte* block = window->alloc(std::max<size_t>(bytes, 1));
  return std::shared_ptr<Memory>(new Memory(std::move(window), block, bytes, 0));
}

std::shared_ptr<Memory> Memory::plain(size_t bytes) {
  auto memory = uninitialized(bytes);
  std::memset(memory->data(), 0, bytes);
  return memory;
}

std::shared_ptr<Memory> Memory::uninitialized(size_t bytes) {
  Block block;
  if (bytes >= kHugePage) block = Spare::get().take(bytes);
  if (block.data == nullptr) block = allocate(bytes);
  return std::shared_ptr<Memory>(new Memory(nullptr, block.data, bytes, block.capacity));
}

Memory::~Memory() {
  const Block block{data_, capacity_};
  if (window_) {
    window_->free(data_);
  } else if (capacity_ >= kHugePage && capacity_ <= kLargestKept) {
    Spare::get().keep(block);
  } else {
    release(block);
  }
}

}  // namespace dcoll
