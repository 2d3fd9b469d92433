// The window of mapped-memory transports: the arena's allocator, offsets, and the board.
#include <atomic>
#include <random>

#include "base/error.h"
#include "support/check.h"
#include "transport/mapped/local.h"
#include "transport/mapped/mapped.h"
#include "transport/ranks.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

MappedOptions small(size_t slot_bytes, int slots, size_t arena_bytes = 1 << 20) {
  return {.arena_bytes = arena_bytes, .slot_bytes = slot_bytes, .slots = slots};
}

}  // namespace

TEST(board_carries_data_and_wakes) {
  constexpr int n = 3;
  constexpr uint64_t kRounds = 1000;
  auto ends = connect_local(n, small(64, 2));
  std::vector<uint64_t> data(n);  // plain memory: only the board orders it
  on_threads(n, [&](int rank) {
    Window& w = *ends[static_cast<size_t>(rank)].window;
    Transport& t = *ends[static_cast<size_t>(rank)].transport;
    // Two posts a round: "my data is there", in one record, and "I have read yours", in the other.
    auto post = [&](uint64_t ticket, const BoardEntry::Post& content) {
      BoardEntry::Record& mine = w.board(rank).record[ticket % 2];
      mine.post = content;
      mine.inline_data[BoardEntry::Record::kInlineBytes - 1] = static_cast<std::byte>(ticket);
      mine.ticket.store(ticket, std::memory_order_release);
      w.notify_all();
    };
    auto theirs = [&](int peer, uint64_t ticket) -> const BoardEntry::Record& {
      const BoardEntry::Record& record = w.board(peer).record[ticket % 2];
      sleep_until(t, [&] { return record.ticket.load(std::memory_order_acquire) >= ticket; });
      return record;
    };
    for (uint64_t seq = 1; seq <= kRounds; ++seq) {
      const uint64_t ready = 2 * seq - 1, finished = 2 * seq;
      data[static_cast<size_t>(rank)] = seq;
      post(ready, {seq * 3, 10, 20, static_cast<uint64_t>(rank)});
      for (int peer = 0; peer < n; ++peer) {
        const BoardEntry::Record& record = theirs(peer, ready);
        CHECK_EQ(record.post.fingerprint, seq * 3);
        CHECK_EQ(record.post.value, static_cast<uint64_t>(peer));
        CHECK(record.inline_data[BoardEntry::Record::kInlineBytes - 1] == static_cast<std::byte>(ready));
        CHECK_EQ(data[static_cast<size_t>(peer)], seq);
      }
      post(finished, {});
      for (int peer = 0; peer < n; ++peer) theirs(peer, finished);
    }
  });
}

TEST(window_outlives_everything_else) {
  auto ends = connect_local(2, small(64, 2));
  std::shared_ptr<Window> window = ends[0].window;
  std::byte* block = window->alloc(100);
  ends.clear();
  std::memset(block, 1, 100);
  std::memset(window->base(1), 1, 100);
  window->notify_all();
  window->free(block);
}

TEST(arena_blocks_are_disjoint_aligned_and_zero) {
  auto ends = connect_local(2, small(64, 2, 64 * page_bytes()));
  Window& w = *ends[1].window;
  const size_t page = page_bytes();
  std::mt19937 random(test::seed());
  struct Block {
    std::byte* at;
    size_t bytes;
    int fill;
  };
  std::vector<Block> blocks;
  for (int round = 1; round <= 400; ++round) {
    if (!blocks.empty() && random() % 2) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      const Block b = blocks.back();
      blocks.pop_back();
      for (size_t i = 0; i < b.bytes; ++i) CHECK_EQ(static_cast<int>(b.at[i]), b.fill);  // nobody wrote into it
      w.free(b.at);
      continue;
    }
    const size_t bytes = 1 + random() % (4 * page);
    std::byte* at = nullptr;
    try {
      at = w.alloc(bytes);
    } catch (const TransportError&) {
      CHECK(blocks.size() > 8);  // full, or too scattered
      continue;
    }
    CHECK_EQ(reinterpret_cast<uintptr_t>(at) % page, uintptr_t{0});
    CHECK(w.offset_of(at, bytes) != Window::kUnmapped);
    for (size_t i = 0; i < bytes; ++i) CHECK_EQ(static_cast<int>(at[i]), 0);
    const int fill = 1 + round % 255;
    std::memset(at, fill, bytes);
    blocks.push_back({at, bytes, fill});
  }
  for (const Block& b : blocks) w.free(b.at);
  std::byte* whole = w.alloc(64 * page);  // all holes were merged
  CHECK(whole == w.base(1));
  for (size_t i = 0; i < 64 * page; ++i) CHECK_EQ(static_cast<int>(whole[i]), 0);
}

TEST(arena_says_when_it_is_full) {
  auto ends = connect_local(1, small(64, 2, 4 << 20));
  Window& w = *ends[0].window;
  std::byte* half = w.alloc(2 << 20);
  CHECK_THROWS(w.alloc((2 << 20) + 1), TransportError, "in the arena of 4194304 bytes (2097152 free");
  CHECK_THROWS(w.alloc((2 << 20) + 1), TransportError, "raise DCOLL_ARENA_MB (now 4)");
  CHECK_THROWS(w.alloc(~size_t{0}), TransportError, "DCOLL_ARENA_MB");
  std::byte* rest = w.alloc(2 << 20);
  CHECK_THROWS(w.alloc(0), TransportError, "DCOLL_ARENA_MB");
  w.free(rest);
  CHECK(w.alloc(0) == rest);
  w.free(nullptr);
  w.free(half);
  CHECK_THROWS(w.free(half), ArgumentError, "did not return");
  CHECK_THROWS(w.free(rest + 1), ArgumentError, "did not return");
  std::byte other;
  CHECK_THROWS(w.free(&other), ArgumentError, "did not return");
}

TEST(arena_serves_several_threads) {
  auto ends = connect_local(1, small(64, 2, 256 * page_bytes()));
  on_threads(4, [&](int thread) {
    for (int k = 0; k < 300; ++k) {
      const size_t bytes = page_bytes() * static_cast<size_t>(1 + (k + thread) % 5);
      std::byte* block = ends[0].window->alloc(bytes);
      for (size_t i = 0; i < bytes; i += 512) CHECK_EQ(static_cast<int>(block[i]), 0);
      std::memset(block, thread + 1, bytes);
      for (size_t i = 0; i < bytes; i += 512) CHECK_EQ(static_cast<int>(block[i]), thread + 1);
      ends[0].window->free(block);
    }
  });
}

TEST(offsets_mean_the_same_everywhere) {
  const size_t page = page_bytes();
  auto ends = connect_local(2, small(64, 2, 3 * page - 5));  // rounded up to whole pages
  Window& w = *ends[0].window;
  CHECK_EQ(w.arena_bytes(), 3 * page);
  const std::byte* base = w.base(0);
  CHECK_EQ(w.offset_of(base, 3 * page), uint64_t{0});
  CHECK_EQ(w.offset_of(base + 5, 3 * page - 5), uint64_t{5});
  CHECK_EQ(w.offset_of(base + 3 * page - 1, 1), uint64_t{3 * page - 1});
  CHECK_EQ(w.offset_of(base + 5, 3 * page - 4), Window::kUnmapped);
  CHECK_EQ(w.offset_of(base - 1, 1), Window::kUnmapped);
  CHECK_EQ(w.offset_of(base + 3 * page, 1), Window::kUnmapped);
  CHECK_EQ(w.offset_of(w.base(1), 1), Window::kUnmapped);  // a peer's arena is not ours
  std::byte* block = w.alloc(10);
  const uint64_t offset = w.offset_of(block, 10);
  block[3] = std::byte{42};
  CHECK_EQ(static_cast<int>(ends[1].window->base(0)[offset + 3]), 42);
  CHECK(ends[1].window->base(1) + offset != block);
  CHECK_EQ(ends[1].window->local_rank(), 1);
  CHECK_EQ(ends[1].window->local_size(), 2);
}

TEST_MAIN
