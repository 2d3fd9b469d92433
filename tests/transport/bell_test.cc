// Sleeping on a descriptor: rung for whoever is registered and for nobody else, and never lost; whether MPI's
// descriptors are believed. Dozing: until a nudge, which is not lost either.
#include "transport/bell.h"

#include <poll.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "support/check.h"
#include "transport/mapped/local.h"
#include "transport/mpi_events.h"
#include "transport/ranks.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

constexpr MappedOptions kSmall{.arena_bytes = 1 << 16, .slot_bytes = 64, .slots = 1};

bool is_rung(const Bell& bell) {
  pollfd rung{bell.descriptor(), POLLIN, 0};
  return poll(&rung, 1, 0) == 1;
}

}  // namespace

TEST(rings_for_whoever_is_registered) {
  auto ends = connect_local(2, kSmall);
  Transport &sleeper = *ends[0].transport, &peer = *ends[1].transport;
  Bell& bell = *sleeper.bell();
  const int word = 0;
  auto act = [&] {
    CHECK(peer.post_send(0, 0, &word, sizeof word));
    CHECK(sleeper.post_recv(1, 0, nullptr, sizeof word));
    CHECK(sleeper.front(1, 0) != nullptr);
    sleeper.pop(1, 0);
  };
  act();
  CHECK(!is_rung(bell));  // nobody sleeps on it

  CHECK(bell.begin_wait(sleeper.prepare_wait()));
  CHECK(!is_rung(bell));
  act();
  CHECK(is_rung(bell));
  bell.end_wait();
  take_ring(bell.descriptor());
  CHECK(!is_rung(bell));
  take_ring(bell.descriptor());  // silent already: returns
  act();
  CHECK(!is_rung(bell));

  const uint32_t early = sleeper.prepare_wait();
  act();
  CHECK(!bell.begin_wait(early));  // something happened since: nobody may sleep
  act();
  CHECK(!is_rung(bell));  // and nobody was left registered

  CHECK(bell.begin_wait(sleeper.prepare_wait()));
  sleeper.wake();
  CHECK(is_rung(bell));
  bell.end_wait();
}

// Both ranks asleep at every hand-over, the one on its bell, the other on its doorbell.
TEST(no_ring_is_lost) {
  auto ends = connect_local(2, kSmall);
  constexpr uint64_t kMessages = 8000;
  on_threads(2, [&](int rank) {
    Transport& t = *ends[static_cast<size_t>(rank)].transport;
    for (uint64_t k = 0; k < kMessages; ++k) {
      if (rank == 0) {
        sleep_until(t, [&] { return t.post_send(1, 0, &k, sizeof(k)); });
      } else {
        CHECK(t.post_recv(0, 0, nullptr, sizeof(k)));
        const std::byte* data = nullptr;
        sleep_on_bell_until(t, [&] { return (data = t.front(0, 0)) != nullptr; });
        CHECK(std::memcmp(data, &k, sizeof(k)) == 0);
        t.pop(0, 0);
      }
    }
  });
}

TEST(descriptors_are_believed_until_a_message_comes_without_them) {
  EventTrust trust;
  CHECK(trust.earned());
  trust.waited(Ended::kNews);
  trust.message_found();
  CHECK(trust.earned());
  trust.waited(Ended::kWoken);
  trust.message_found();  // it may have come in that moment
  CHECK(trust.earned());
  trust.waited(Ended::kTooLong);
  CHECK(trust.earned());
  trust.message_found();
  CHECK(!trust.earned());
  for (int i = 0; i < 10; ++i) trust.message_found();  // with the one that was not announced
  trust.waited(Ended::kWoken);
  for (int i = 0; i < 10; ++i) trust.message_found();
  CHECK(!trust.earned());
  for (int i = 0; i < 4; ++i) {
    CHECK(!trust.earned());
    trust.waited(Ended::kNews);
    trust.message_found();
  }
  CHECK(trust.earned());
}

TEST(descriptors_that_announce_nothing_are_not_believed) {
  EventTrust trust;
  for (int i = 0; i < 1000; ++i) trust.waited(Ended::kNews);
  CHECK(!trust.earned());
  trust.message_found();
  CHECK(trust.earned());
}

TEST(a_nudge_ends_the_doze_of_a_rank_that_is_alert) {
  auto ends = connect_local(3, kSmall);
  Transport& dozer = *ends[0].transport;
  Transport& peer = *ends[1].transport;
  uint32_t before = dozer.prepare_wait();
  peer.nudge();
  CHECK_EQ(dozer.prepare_wait(), before);  // not alert
  CHECK(dozer.alert(true));
  peer.nudge();
  peer.nudge();
  CHECK_EQ(dozer.prepare_wait(), before + 1);  // once
  CHECK(dozer.take_nudge());                   // it came before the ticket was drawn, and is not lost
  CHECK(!dozer.take_nudge());
  CHECK(dozer.alert(false));
  before = dozer.prepare_wait();
  peer.nudge();
  CHECK_EQ(dozer.prepare_wait(), before);

  std::atomic<int> stage{0};
  constexpr int kTimes = 2000;
  std::thread nudger([&] {
    for (int k = 1; k <= kTimes; ++k) {
      stage.store(k);
      while (stage.load() == k) {
        peer.nudge();
        std::this_thread::yield();
      }
    }
  });
  for (int k = 1; k <= kTimes; ++k) {
    dozer.alert(true);
    while (stage.load() != k) {
      const uint32_t ticket = dozer.prepare_wait();
      if (!dozer.take_nudge()) dozer.doze(ticket, kHang);
    }
    dozer.alert(false);
    stage.store(-k);
  }
  nudger.join();
}

TEST(a_doze_ends_at_its_limit) {
  auto ends = connect_local(1, kSmall);
  Transport& t = *ends[0].transport;
  const auto begin = std::chrono::steady_clock::now();
  constexpr auto kLimit = std::chrono::milliseconds(1100);  // more than a second: the kernel counts them apart
  t.doze(t.prepare_wait(), kLimit);
  CHECK(std::chrono::steady_clock::now() - begin >= kLimit);
  CHECK(std::chrono::steady_clock::now() - begin < kHang);
  t.doze(t.prepare_wait(), std::chrono::microseconds(-5));
}

TEST_MAIN
