#include "engine/core/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <iterator>
#include <new>
#include <system_error>
#include <vector>

#include "base/error.h"
#include "base/fork.h"
#include "base/thread_safety.h"
#include "base/types.h"

namespace dcoll {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

struct Block {
  std::byte* data = nullptr;
  size_t capacity = 0;
};

size_t alignment_of(size_t capacity) { return capacity >= kHugePage ? kHugePage : Memory::kAlignment; }

void release(Block block) {
  if (block.data != nullptr) ::operator delete(block.data, std::align_val_t{alignment_of(block.capacity)});
}

// The large blocks that were freed last, for the next that are about as large. Never destroyed: a block may be freed
// later than static objects.
class Spare {
 public:
  static Spare& get() {
    static auto* spare = new Spare();
    return *spare;
  }
  Block take(size_t bytes) {
    if (fork_.in_child()) return {};
    const MutexLock lock(mutex_);
    const auto found = std::find_if(kept_.rbegin(), kept_.rend(), [&](const Block& block) {
      return block.capacity >= bytes && block.capacity <= 2 * bytes;
    });
    if (found == kept_.rend()) return {};
    const Block block = *found;
    kept_.erase(std::prev(found.base()));
    kept_bytes_ -= block.capacity;
    return block;
  }
  Spare() { kept_.reserve(Memory::kMostKeptBlocks + 1); }  // keeping one, in a destructor, must not need memory
  void keep(Block block) {
    if (fork_.in_child()) return release(block);  // the lock may be held by a thread that only the parent has
    const MutexLock lock(mutex_);
    kept_.push_back(block);
    kept_bytes_ += block.capacity;
    while (kept_bytes_ > Memory::kMostKept || kept_.size() > Memory::kMostKeptBlocks) {
      kept_bytes_ -= kept_.front().capacity;
      release(kept_.front());
      kept_.erase(kept_.begin());
    }
  }
  Memory::Kept kept() {
    const MutexLock lock(mutex_);
    return {kept_.size(), kept_bytes_};
  }

 private:
  ForkGuard fork_;
  Mutex mutex_;
  std::vector<Block> kept_ DCOLL_GUARDED_BY(mutex_);  // the last to be freed is the last
  size_t kept_bytes_ DCOLL_GUARDED_BY(mutex_) = 0;
};

Block allocate(size_t bytes) {
  const size_t capacity = bytes < kHugePage ? std::max<size_t>(bytes, 1) : round_up(bytes, kHugePage);
  auto* data = static_cast<std::byte*>(::operator new(capacity, std::align_val_t{alignment_of(capacity)}));
  if (capacity >= kHugePage) madvise(data, capacity, MADV_HUGEPAGE);  // refused: small pages, no harm
  return {data, capacity};
}

}  // namespace

std::shared_ptr<Memory> Memory::mapped(std::shared_ptr<Window> window, size_t bytes) {
  std::shared_ptr<Memory> memory(new Memory(std::move(window), bytes));  // first what may find no memory
  memory->data_ = memory->window_->alloc(std::max<size_t>(bytes, 1));
  return memory;
}

std::shared_ptr<Memory> Memory::plain(size_t bytes) {
  auto memory = uninitialized(bytes);
  std::memset(memory->data(), 0, bytes);
  return memory;
}

std::shared_ptr<Memory> Memory::uninitialized(size_t bytes) {
  std::shared_ptr<Memory> memory(new Memory(nullptr, bytes));
  Block block;
  if (bytes >= kLeastKept) block = Spare::get().take(bytes);
  if (block.data == nullptr) block = allocate(bytes);
  memory->data_ = block.data;
  memory->capacity_ = block.capacity;
  return memory;
}

Memory::Kept Memory::kept() { return Spare::get().kept(); }

void Memory::appear_at(void* address, size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (!is_mapped() || bytes == 0 || bytes > bytes_ || reinterpret_cast<uintptr_t>(address) % page != 0) {
    throw ArgumentError(
        "only the pages of a mapped block can appear elsewhere: in place of whole pages, and no more of "
        "them than it has");
  }
  const size_t length = round_up(bytes, page);  // the arena's blocks are whole pages
  // Of a shared mapping, no bytes moved to a new length are a second mapping of the same pages (mremap(2)). First where
  // nothing is: what can fail fails there.
  void* const second = mremap(data_, 0, length, MREMAP_MAYMOVE);
  if (second == MAP_FAILED) throw Error("mremap of mapped memory: " + std::generic_category().message(errno));
  std::memcpy(data_, address, bytes);
  if (mremap(second, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, address) == MAP_FAILED) {
    const int error = errno;
    munmap(second, length);
    throw Error("mremap of mapped memory to where other was: " + std::generic_category().message(error));
  }
}

Memory::~Memory() {
  const Block block{data_, capacity_};
  if (window_) {
    window_->free(data_);
  } else if (capacity_ >= kLeastKept && capacity_ <= kMostKept) {
    Spare::get().keep(block);
  } else {
    release(block);
  }
}

}  // namespace dcoll
