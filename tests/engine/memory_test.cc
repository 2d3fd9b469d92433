// The pool of freed blocks that large results are made of: what it keeps, how much at most, and what it hands out.
#include "engine/core/memory.h"

#include <cstring>
#include <vector>

#include "support/check.h"

using namespace dcoll;

namespace {

constexpr size_t kMiB = size_t{1} << 20;

// Whatever was kept before goes: as many small blocks as are kept at all push out the rest.
void push_out() {
  std::vector<std::shared_ptr<Memory>> blocks;
  for (size_t i = 0; i < 2 * Memory::kMostKeptBlocks; ++i) {
    blocks.push_back(Memory::uninitialized(Memory::kLeastKept));
  }
}

}  // namespace

TEST(at_most_so_many_blocks_are_kept) {
  push_out();
  CHECK_EQ(Memory::kept().blocks, Memory::kMostKeptBlocks);
  CHECK_EQ(Memory::kept().bytes, Memory::kMostKeptBlocks * Memory::kLeastKept);
}

TEST(at_most_so_many_bytes_are_kept) {
  push_out();
  {
    std::vector<std::shared_ptr<Memory>> blocks;
    for (size_t mib : {24, 30, 20, 40}) blocks.push_back(Memory::uninitialized(mib * kMiB));
    while (!blocks.empty()) {
      blocks.pop_back();
      CHECK(Memory::kept().bytes <= Memory::kMostKept);
    }
  }
  // The last to be freed, of 24 and 30 MiB; with the one of 20 it would be too much.
  CHECK_EQ(Memory::kept().blocks, size_t{2});
  CHECK_EQ(Memory::kept().bytes, 54 * kMiB);
  Memory::uninitialized(Memory::kMostKept);  // as much as is kept at all: nothing else is
  CHECK_EQ(Memory::kept().blocks, size_t{1});
  CHECK_EQ(Memory::kept().bytes, Memory::kMostKept);
}

TEST(small_and_huge_blocks_are_not_kept) {
  push_out();
  const Memory::Kept before = Memory::kept();
  Memory::uninitialized(Memory::kLeastKept - 1);
  Memory::uninitialized(Memory::kMostKept + 1);
  CHECK_EQ(Memory::kept().blocks, before.blocks);
  CHECK_EQ(Memory::kept().bytes, before.bytes);
}

TEST(a_block_is_used_again_for_what_is_about_as_large) {
  push_out();
  auto memory = Memory::uninitialized(3 * kMiB);  // rounded up to 4: huge pages
  const std::byte* block = memory->data();
  memory.reset();
  for (const size_t bytes : {4 * kMiB, 2 * kMiB}) {
    memory = Memory::uninitialized(bytes);
    CHECK(memory->data() == block);
    CHECK_EQ(memory->bytes(), bytes);
    CHECK_EQ(Memory::kept().blocks, Memory::kMostKeptBlocks - 1);
    memory.reset();
  }
  for (const size_t bytes : {4 * kMiB + 1, 2 * kMiB - 1}) {
    memory = Memory::uninitialized(bytes);
    CHECK(memory->data() != block);
    memory.reset();
    push_out();
    memory = Memory::uninitialized(3 * kMiB);
    block = memory->data();
    memory.reset();
  }
}

TEST(zeroed_memory_is_zeroed_in_a_used_block) {
  for (int i = 0; i < 2; ++i) {
    const auto memory = Memory::plain(Memory::kLeastKept);
    for (size_t at = 0; at < memory->bytes(); ++at) CHECK(memory->data()[at] == std::byte{0});
    std::memset(memory->data(), 7, memory->bytes());
  }
}

TEST_MAIN
