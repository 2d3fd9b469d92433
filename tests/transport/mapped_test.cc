// The mapped-memory transport and window, with ranks as threads.
#include "transport/mapped/mapped.h"

#include <unistd.h>

#include <atomic>
#include <random>

#include "base/error.h"
#include "support/check.h"
#include "transport/mapped/local.h"
#include "transport/ranks.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

MappedOptions small(size_t slot_bytes, int slots, size_t arena_bytes = 1 << 20) {
  return {.arena_bytes = arena_bytes, .slot_bytes = slot_bytes, .slots = slots};
}

// Start of a rank's region, as rank `from` sees it: to play a peer that writes nonsense.
std::byte* region_of(Endpoint& from, int rank, const RegionLayout& layout) {
  return from.window->base(rank) - layout.arena_offset;
}

}  // namespace

TEST(arenas_of_all_local_ranks_fit_the_address_space) {
  constexpr size_t kMiB = size_t{1} << 20, kTiB = size_t{1} << 40;
  CHECK_EQ(arena_bytes_of_each(3 * kTiB / 2, 8), 3 * kTiB / 2);  // as much as the machine has
  for (const size_t ranks : {1, 2, 3, 43, 96, 128, 4096}) {
    for (const size_t wanted : {16 * kMiB, 3 * kTiB / 2, 64 * kTiB, 100 * kTiB}) {
      const size_t bytes = arena_bytes_of_each(wanted, ranks);
      CHECK(bytes <= wanted && ranks * bytes <= 32 * kTiB);
      CHECK(bytes == wanted || 32 * kTiB - ranks * bytes < ranks * kMiB);  // no less than there is room for
    }
  }
}

TEST(every_size_arrives_in_order) {
  constexpr size_t kSlotBytes = 259;  // not a multiple of anything
  auto ends = connect_local(2, small(kSlotBytes, 3));
  on_threads(2, [&](int rank) {
    Transport& t = *ends[static_cast<size_t>(rank)].transport;
    for (size_t bytes = 1; bytes <= kSlotBytes; ++bytes) {
      for (const int channel : {0, kMaxChannels - 1, kControlChannel}) {
        const uint64_t k = bytes * 10 + static_cast<uint64_t>(channel);
        if (rank == 0 && bytes % 2 == 0) {
          send(t, 1, channel, message(k, bytes));
        } else if (rank == 0) {
          std::byte* room = nullptr;
          poll_until([&] { return (room = t.acquire_send(1, channel, bytes)) != nullptr; });
          const auto data = message(k, bytes);
          std::memcpy(room, data.data(), bytes);
          t.commit_send(1, channel);
        } else if (bytes % 3 == 0) {
          CHECK(receive(t, 0, channel, bytes) == message(k, bytes));
        } else {
          CHECK(t.post_recv(0, channel, nullptr, bytes));
          const std::byte* data = nullptr;
          poll_until([&] { return (data = t.front(0, channel)) != nullptr; });
          CHECK(is_message(data, k, bytes));
          CHECK(t.front(0, channel) == data);
          t.pop(0, channel);
        }
      }
    }
  });
}

TEST(full_ring_refuses_until_a_slot_is_popped) {
  for (const int slots : {1, 2, 5}) {
    auto ends = connect_local(2, small(64, slots));
    Transport& a = *ends[0].transport;
    Transport& b = *ends[1].transport;
    uint64_t sent = 0, received = 0;
    for (; sent < static_cast<uint64_t>(slots); ++sent) CHECK(a.post_send(1, 2, &sent, sizeof(sent)));
    for (int round = 0; round < 3 * slots; ++round) {
      CHECK(!a.post_send(1, 2, &sent, sizeof(sent)));
      CHECK(a.acquire_send(1, 2, sizeof(sent)) == nullptr);
      CHECK_EQ(a.posted(1, 2), sent);
      uint64_t other = 7;
      CHECK(round > 0 || a.post_send(1, 3, &other, sizeof(other)));  // another channel is not affected
      uint64_t got = ~0ull;
      CHECK(b.post_recv(0, 2, &got, sizeof(got)));
      CHECK(b.front(0, 2) == reinterpret_cast<std::byte*>(&got));
      CHECK(!a.post_send(1, 2, &sent, sizeof(sent)));  // front alone frees nothing
      b.pop(0, 2);
      CHECK_EQ(got, received++);
      CHECK(a.post_send(1, 2, &sent, sizeof(sent)));
      ++sent;
    }
  }
}

TEST(posted_receives_are_bounded_and_served_in_order) {
  auto ends = connect_local(2, small(64, 2));
  Transport& a = *ends[0].transport;
  Transport& b = *ends[1].transport;
  int x = 0, y = 0, z = 0;
  CHECK(b.front(0, 0) == nullptr);
  CHECK(b.post_recv(0, 0, &x, 4));
  CHECK(b.post_recv(0, 0, &y, 3));
  CHECK(!b.post_recv(0, 0, &z, 4));
  CHECK(b.front(0, 0) == nullptr);
  const int one = 1, two = 2;
  CHECK(a.post_send(1, 0, &one, 4));
  CHECK(a.post_send(1, 0, &two, 3));
  CHECK(b.front(0, 0) != nullptr);
  b.pop(0, 0);
  CHECK(b.front(0, 0) != nullptr);
  b.pop(0, 0);
  CHECK_EQ(x, 1);
  CHECK_EQ(y, 2);
  CHECK(b.post_recv(0, 0, &z, 4));
  CHECK(b.front(0, 0) == nullptr);
}

TEST(memory_may_be_reused_after_post_send) {
  auto ends = connect_local(2, small(5000, 4));
  Transport& a = *ends[0].transport;
  for (const size_t bytes : {size_t{8}, size_t{48}, size_t{49}, size_t{5000}}) {
    auto data = message(bytes, bytes);
    CHECK(a.post_send(1, 0, data.data(), bytes));
    CHECK_EQ(a.sent(1, 0), a.posted(1, 0));
    std::fill(data.begin(), data.end(), std::byte{0});
    CHECK(receive(*ends[1].transport, 0, 0, bytes) == message(bytes, bytes));
  }
}

TEST(acquired_room_is_in_place) {
  auto ends = connect_local(2, small(4096, 2));
  Transport& a = *ends[0].transport;
  std::byte* room = a.acquire_send(1, 1, 4096);
  CHECK(room != nullptr);
  CHECK(a.acquire_send(1, 1, 4096) == room);
  CHECK_EQ(reinterpret_cast<uintptr_t>(room) % 64, uintptr_t{0});
  CHECK_EQ(a.posted(1, 1), uint64_t{0});
  CHECK_THROWS(a.acquire_send(1, 1, 8), TransportError, "8 bytes before commit_send of the 4096 bytes");
  CHECK_THROWS(a.post_send(1, 1, room, 8), TransportError, "between acquire_send and commit_send");
  const auto data = message(9, 4096);
  std::memcpy(room, data.data(), 4096);
  Transport& b = *ends[1].transport;
  CHECK(b.post_recv(0, 1, nullptr, 4096));
  CHECK(b.front(0, 1) == nullptr);
  a.commit_send(1, 1);
  CHECK_EQ(a.posted(1, 1), uint64_t{1});
  CHECK(b.front(0, 1) == room);  // one process: the receiver reads the very bytes, copied by nobody
  CHECK(is_message(room, 9, 4096));
  b.pop(0, 1);
  CHECK_THROWS(a.commit_send(1, 1), TransportError, "commit_send without acquire_send");
  CHECK_THROWS(b.pop(0, 1), TransportError, "pop before front");
}

TEST(a_rank_can_send_to_itself) {
  auto ends = connect_local(1, small(64, 2));
  send(*ends[0].transport, 0, 0, message(1, 33));
  CHECK(receive(*ends[0].transport, 0, 0, 33) == message(1, 33));
  ends[0].transport->check_peers();
}

// Everybody sends random messages to everybody on every channel, all under way at once.
TEST(all_to_all_random_traffic) {
  constexpr size_t kSlotBytes = 1000;
  for (int n = 1; n <= 8; ++n) {
    auto ends = connect_local(n, small(kSlotBytes, 3));
    const uint64_t messages = n <= 4 ? 60 : 25;
    auto length = [](int from, int to, int channel, uint64_t k) {
      std::mt19937_64 random(test::seed() + k * 7919 + static_cast<uint64_t>(from * 1000 + to * 100 + channel));
      return random() % 3 == 0 ? 1 + random() % 60 : 1 + random() % kSlotBytes;
    };
    auto tag = [](int from, int to, int channel, uint64_t k) {
      return k * 31 + static_cast<uint64_t>(from * 17 + to * 5 + channel);
    };
    on_threads(n, [&](int me) {
      Transport& t = *ends[static_cast<size_t>(me)].transport;
      struct Fifo {
        uint64_t sent = 0, received = 0;
        bool pending = false;
        std::vector<std::byte> buffer;
      };
      std::vector<Fifo> fifos(static_cast<size_t>(n) * kAllChannels);
      uint64_t left = 2 * messages * fifos.size();
      poll_until([&] {
        for (int peer = 0; peer < n; ++peer) {
          for (int channel = 0; channel < kAllChannels; ++channel) {
            Fifo& f = fifos[static_cast<size_t>(peer * kAllChannels + channel)];
            if (f.sent < messages) {
              const auto data = message(tag(me, peer, channel, f.sent), length(me, peer, channel, f.sent));
              if (t.post_send(peer, channel, data.data(), data.size())) ++f.sent, --left;
            }
            if (f.received == messages) continue;
            const size_t bytes = length(peer, me, channel, f.received);
            if (!f.pending) {
              f.buffer.assign(bytes, std::byte{0});
              f.pending = t.post_recv(peer, channel, f.received % 2 ? f.buffer.data() : nullptr, bytes);
              CHECK(f.pending);
            }
            if (const std::byte* data = t.front(peer, channel)) {
              CHECK(is_message(data, tag(peer, me, channel, f.received), bytes));
              t.pop(peer, channel);
              f.pending = false;
              ++f.received, --left;
            }
          }
        }
        return left == 0;
      });
    });
  }
}

// Two ranks that never spin: every hand-over needs a wake-up, by a message or (one slot) by a freed slot.
TEST(no_wake_up_is_lost_between_two) {
  auto ends = connect_local(2, small(64, 1));
  constexpr uint64_t kMessages = 8000;
  on_threads(2, [&](int rank) {
    Transport& t = *ends[static_cast<size_t>(rank)].transport;
    for (uint64_t k = 0; k < kMessages; ++k) {
      if (rank == 0) {
        sleep_until(t, [&] { return t.post_send(1, 0, &k, sizeof(k)); });
      } else {
        CHECK(t.post_recv(0, 0, nullptr, sizeof(k)));
        const std::byte* data = nullptr;
        sleep_until(t, [&] { return (data = t.front(0, 0)) != nullptr; });
        CHECK(std::memcmp(data, &k, sizeof(k)) == 0);
        t.pop(0, 0);
      }
    }
  });
}

TEST(no_wake_up_is_lost_among_many) {
  constexpr int n = 4;
  constexpr int kRounds = 800;
  auto ends = connect_local(n, small(64, 2));
  on_threads(n, [&](int rank) {  // rank 0 answers whoever calls
    Transport& t = *ends[static_cast<size_t>(rank)].transport;
    if (rank > 0) {
      for (int k = 0; k < kRounds; ++k) {
        sleep_until(t, [&] { return t.post_send(0, 0, &k, sizeof(k)); });
        int answer = -1;
        CHECK(t.post_recv(0, 0, &answer, sizeof(answer)));
        sleep_until(t, [&] { return t.front(0, 0) != nullptr; });
        t.pop(0, 0);
        CHECK_EQ(answer, k + rank);
      }
      return;
    }
    for (int peer = 1; peer < n; ++peer) CHECK(t.post_recv(peer, 0, nullptr, sizeof(int)));
    for (int served = 0; served < kRounds * (n - 1);) {
      sleep_until(t, [&] {
        bool any = false;
        for (int peer = 1; peer < n; ++peer) {
          const std::byte* data = t.front(peer, 0);
          if (data == nullptr) continue;
          int call;
          std::memcpy(&call, data, sizeof(call));
          call += peer;
          t.pop(peer, 0);
          CHECK(t.post_recv(peer, 0, nullptr, sizeof(int)));
          CHECK(t.post_send(peer, 0, &call, sizeof(call)));
          any = true;
          ++served;
        }
        return any;
      });
    }
  });
}

TEST(wake_ends_a_wait_from_another_thread) {
  auto ends = connect_local(1, small(64, 2));
  Transport& t = *ends[0].transport;
  std::atomic<int> stage{0};
  constexpr int kTimes = 2000;
  std::thread waker([&] {
    for (int k = 1; k <= kTimes; ++k) {
      stage.store(k);
      t.wake();
      while (stage.load() == k) std::this_thread::yield();
    }
  });
  for (int k = 1; k <= kTimes; ++k) {
    sleep_until(t, [&] { return stage.load() == k; });
    stage.store(-k);
  }
  waker.join();
  const auto before = std::chrono::steady_clock::now();
  t.wait(t.prepare_wait() - 1, kHang);  // something happened since that ticket: no sleep
  CHECK(std::chrono::steady_clock::now() - before < kHang);
  t.wait(t.prepare_wait(), std::chrono::microseconds(0));
  t.wait(t.prepare_wait(), std::chrono::microseconds(-5));
}

TEST(first_failure_notice_wins) {
  auto ends = connect_local(3, small(64, 2));
  for (auto& end : ends) CHECK_EQ(end.transport->poll_failure(), std::string());
  std::thread sleeper(
      [&] { sleep_until(*ends[2].transport, [&] { return !ends[2].transport->poll_failure().empty(); }); });
  ends[0].transport->post_failure("first cause");
  ends[0].transport->post_failure("second cause");
  sleeper.join();
  ends[1].transport->post_failure("third cause");
  for (auto& end : ends) CHECK_EQ(end.transport->poll_failure(), std::string("first cause"));
}

// Who has heard of it may end before the rank that failed has told all: it tells all as well.
TEST(failure_notices_are_passed_on) {
  auto ends = connect_local(3, small(64, 2));
  ends[1].transport->post_failure("cause");
  CHECK_EQ(ends[1].transport->poll_failure(), std::string());
  CHECK_EQ(ends[0].transport->poll_failure(), std::string("cause"));
  CHECK_EQ(ends[1].transport->poll_failure(), std::string("cause"));
}

TEST(long_failure_notices_are_cut_between_characters) {
  for (const size_t ascii : {size_t{998}, size_t{999}, size_t{1000}, size_t{1001}}) {
    auto ends = connect_local(2, small(64, 2));
    const std::string text = std::string(ascii, 'x') + "\xe2\x82\xac and more";  // the euro sign: three bytes
    ends[0].transport->post_failure(text);
    CHECK_EQ(ends[1].transport->poll_failure(), std::string(std::min<size_t>(ascii, 1000), 'x'));
  }
}

TEST(closing_is_told_and_messages_survive_it) {
  auto ends = connect_local(3, small(64, 2));
  for (auto& end : ends) end.transport->check_peers();
  send(*ends[1].transport, 0, 0, message(4, 20));
  std::thread closer([&] { ends[1].transport.reset(); });
  sleep_until(*ends[0].transport, [&] {
    try {
      ends[0].transport->check_peers();
      return false;
    } catch (const PeerError&) {
      return true;
    }
  });
  closer.join();
  CHECK_THROWS(ends[2].transport->check_peers(), PeerError,
               "local rank 1 (pid " + std::to_string(getpid()) + ") closed its communicator");
  CHECK(receive(*ends[0].transport, 1, 0, 20) == message(4, 20));
}

TEST(length_mismatch_names_peer_channel_and_lengths) {
  auto ends = connect_local(2, small(64, 2));
  CHECK(ends[0].transport->post_send(1, 3, "abcdefgh", 8));
  CHECK(ends[1].transport->post_recv(0, 3, nullptr, 7));
  CHECK_THROWS(ends[1].transport->front(0, 3), TransportError, "local rank 0");
  CHECK_THROWS(ends[1].transport->front(0, 3), TransportError, "sent 8 bytes on channel 3");
  CHECK_THROWS(ends[1].transport->front(0, 3), TransportError, "expected 7");
}

TEST(a_length_only_the_sender_knows) {
  auto ends = connect_local(2, small(64, 2));
  Transport& a = *ends[0].transport;
  Transport& b = *ends[1].transport;
  for (const size_t bytes : {1, 33, 40}) {
    CHECK(b.post_recv_up_to(0, 0, 40));
    send(a, 1, 0, message(bytes, bytes));
    const std::byte* data = nullptr;
    poll_until([&] { return (data = b.front(0, 0)) != nullptr; });
    CHECK_EQ(b.front_bytes(0, 0), bytes);
    CHECK(is_message(data, bytes, bytes));
    b.pop(0, 0);
  }
  CHECK(b.post_recv_up_to(0, 0, 40));
  send(a, 1, 0, message(1, 41));
  CHECK_THROWS(poll_until([&] { return b.front(0, 0) != nullptr; }), TransportError, "sent 41 bytes");
}

TEST(nonsense_written_by_a_peer_is_rejected) {
  const MappedOptions options = small(64, 2);
  const RegionLayout layout(2, options);
  auto ends = connect_local(2, options);
  // Rank 1 claims to have received more than was sent.
  auto* head = reinterpret_cast<RingHead*>(region_of(ends[0], 1, layout) + layout.ring_offset(0, 0));
  int x = 0;
  CHECK(ends[0].transport->post_send(1, 0, &x, 4));
  CHECK(ends[0].transport->post_send(1, 0, &x, 4));
  head->popped.store(3);
  CHECK_THROWS(ends[0].transport->post_send(1, 0, &x, 4), TransportError, "claims to have received 3 messages");
  // Rank 0 states a length beyond the slot.
  auto* slot = reinterpret_cast<SlotHeader*>(reinterpret_cast<std::byte*>(head) + sizeof(RingHead));
  slot->stamp.store(uint64_t{1} << 32 | 0xffffffff);
  CHECK(ends[1].transport->post_recv(0, 0, nullptr, 64));
  CHECK_THROWS(ends[1].transport->front(0, 0), TransportError, "sent 4294967295 bytes");
  // A notice longer than its field.
  FailureNotice& notice = reinterpret_cast<RegionHeader*>(region_of(ends[0], 1, layout))->failure;
  notice.length = 1u << 30;
  notice.state.store(FailureNotice::kReady);
  CHECK_EQ(ends[1].transport->poll_failure().size(), size_t{1000});
}

TEST(arguments_are_checked) {
  auto ends = connect_local(2, small(64, 2));
  Transport& t = *ends[0].transport;
  char data[65] = {};
  CHECK_THROWS(t.post_send(1, 0, data, 65), ArgumentError, "65 bytes cannot be sent; allowed are 1 to 64");
  CHECK_THROWS(t.post_send(1, 0, data, 0), ArgumentError, "0 bytes");
  CHECK_THROWS(t.acquire_send(1, 0, 65), ArgumentError, "65 bytes");
  CHECK_THROWS(t.post_recv(1, 0, data, 65), ArgumentError, "65 bytes");
  CHECK_THROWS(t.post_send(2, 0, data, 1), ArgumentError, "peer 2 (of 2)");
  CHECK_THROWS(t.post_send(-1, 0, data, 1), ArgumentError, "peer -1");
  CHECK_THROWS(t.front(0, kAllChannels), ArgumentError, "channel " + std::to_string(kAllChannels) + " (of ");
  CHECK_THROWS(connect_local(0, small(64, 2)), ArgumentError, "number of local ranks is 0");
  CHECK_THROWS(connect_local(2, small(0, 2)), ArgumentError, "slot bytes (DCOLL_SLICE_KB) is 0");
  CHECK_THROWS(connect_local(2, small(64, 0)), ArgumentError, "number of slots (DCOLL_SLOTS) is 0");
  CHECK_THROWS(connect_local(2, small(64, 2, size_t{1} << 50)), ArgumentError, "DCOLL_ARENA_MB");
  CHECK_EQ(std::string(t.name()), std::string("local"));
  CHECK_EQ(t.max_message_bytes(), size_t{64});
  CHECK_EQ(ends[1].transport->rank(), 1);
  CHECK_EQ(t.size(), 2);
}

TEST_MAIN
