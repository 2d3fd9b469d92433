// A block of memory with an owner: the node's shared arena or plain aligned memory.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>

#include "transport/window.h"

namespace dcoll {

// Of no bytes the pointers may be anything.
inline void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

class Memory {
 public:
  static constexpr size_t kAlignment = 64;  // a cache line, and the widest SIMD register

  // Zeroed, in the arena of `window`; peers of the node can read and write it.
  static std::shared_ptr<Memory> mapped(std::shared_ptr<Window> window, size_t bytes);
  // Zeroed, private.
  static std::shared_ptr<Memory> plain(size_t bytes);
  // Private, for what is about to be overwritten. From 2 MiB blocks lie on huge pages, and those from 128 KiB that were
  // freed last are kept and used again, for up to twice less: otherwise a result costs more in page faults than in
  // copying.
  static std::shared_ptr<Memory> uninitialized(size_t bytes);
  static constexpr size_t kLeastKept = size_t{128} << 10;  // smaller ones malloc() keeps by itself
  static constexpr size_t kMostKept = size_t{64} << 20;    // in all
  static constexpr size_t kMostKeptBlocks = 32;
  struct Kept {
    size_t blocks, bytes;
  };
  static Kept kept();
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  bool is_mapped() const { return window_ != nullptr; }

  // Has the pages of a mapped block appear at `address` too, in place of whole pages there, which whoever mapped them
  // will unmap. The block gets what was there. Until then nobody else may touch it; the block must live as long.
  void appear_at(void* address, size_t bytes);

 private:
  Memory(std::shared_ptr<Window> window, size_t bytes) : window_(std::move(window)), bytes_(bytes) {}
  std::shared_ptr<Window> window_;  // keeps the mapping alive as long as the block
  std::byte* data_ = nullptr;
  size_t bytes_;
  size_t capacity_ = 0;  // of the block, of private memory
};

}  // namespace dcoll
