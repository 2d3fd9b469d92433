#include "engine/memory.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace dcoll {

std::shared_ptr<Memory> Memory::mapped(std::shared_ptr<Window> window, size_t bytes) {
  std::byte* block = window->alloc(std::max<size_t>(bytes, 1));
  return std::shared_ptr<Memory>(new Memory(std::move(window), block, bytes));
}

std::shared_ptr<Memory> Memory::plain(size_t bytes) {
  auto memory = uninitialized(bytes);
  std::memset(memory->data(), 0, bytes);
  return memory;
}

std::shared_ptr<Memory> Memory::uninitialized(size_t bytes) {
  auto* block = static_cast<std::byte*>(::operator new(std::max<size_t>(bytes, 1), std::align_val_t{kAlignment}));
  return std::shared_ptr<Memory>(new Memory(nullptr, block, bytes));
}

Memory::~Memory() {
  if (window_) {
    window_->free(data_);
  } else {
    ::operator delete(data_, std::align_val_t{kAlignment});
  }
}

}  // namespace dcoll
