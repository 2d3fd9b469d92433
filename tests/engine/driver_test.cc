// The background thread: nobody who asks for a turn is forgotten, whatever the thread sleeps on, and nothing of what
// has been detached is touched.
#include "engine/communicator/driver.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "base/error.h"
#include "support/check.h"
#include "support/threads.h"
#include "transport/mapped/local.h"
#include "transport/mapped/subset.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

constexpr int kRounds = 2000;

// Has a turn until it was looked at as often as it was asked for; what nobody asked for it does not take.
class Client final : public Driven {
 public:
  explicit Client(Transport& transport) : transport_(transport) {}
  Transport& sleeps_on() override { return transport_; }
  bool take_turn(bool, bool in_any_case) override {
    if (transport_.take_nudge()) asked.fetch_add(1);
    const bool wants = looked.load() < asked.load();
    if (wants && in_any_case && !shy.load()) ++late_;
    for (int i = 0; i < 10; ++i) std::this_thread::yield();  // somebody asks now, before the round is over
    return (wants && (in_any_case || !shy.load())) || lingers.load();
  }
  Look look() override {
    CHECK(!gone.load());
    const int now = asked.load();
    return {.again = looked.exchange(now) < now};
  }
  void await(int times) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (looked.load() < times && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    CHECK(looked.load() >= times);
  }
  // Turns that came only because the thread looks now and then in any case, once it has dozed for long. On a busy
  // machine somebody may ask just then.
  void check_not_forgotten() const { CHECK(late_ <= 1); }

  std::atomic<int> asked{0}, looked{0};
  std::atomic<bool> lingers{false};  // it stays in turn, so the driver sleeps in a wait()
  std::atomic<bool> shy{false};      // it has a turn in any case alone
  std::atomic<bool> gone{false};

 private:
  Transport& transport_;
  int late_ = 0;
};

std::vector<Endpoint> some_ranks(int n) {
  return connect_local(n, {.arena_bytes = size_t{1} << 20, .slot_bytes = 64, .slots = 2});
}

// The transport of each of `ends` once more, over regions of its own.
std::vector<Endpoint> once_more(const std::vector<Endpoint>& ends) {
  std::vector<int> all;
  for (size_t rank = 0; rank < ends.size(); ++rank) all.push_back(static_cast<int>(rank));
  std::vector<std::unique_ptr<SubsetRegion>> regions;
  std::vector<uint64_t> offsets;
  for (const Endpoint& end : ends) {
    regions.push_back(std::make_unique<SubsetRegion>(end.window, all, MappedOptions{.slot_bytes = 64, .slots = 2}));
    offsets.push_back(regions.back()->offset());
  }
  std::vector<Endpoint> made;
  for (const auto& region : regions) made.push_back(region->connect(offsets, all));
  return made;
}

}  // namespace

TEST(whoever_asks_has_a_turn) {
  for (const bool one_doorbell : {true, false}) {
    for (const int threads : {1, 4}) {  // of one nobody else makes up for what is lost
      const bool lingers = threads > 1;
      const auto ends = some_ranks(1);
      const auto other = one_doorbell ? once_more(ends) : some_ranks(1);
      Client first(*ends[0].transport), second(*other[0].transport);
      second.lingers = lingers;
      Driver driver(-1, Log{});
      driver.attach(first);
      driver.attach(second);
      CHECK(driver.start());
      on_threads(threads, [&](int thread) {
        Client& client = thread % 2 ? first : second;
        for (int round = 0; round < kRounds; ++round) {
          const int ticket = client.asked.fetch_add(1) + 1;
          driver.wake();
          client.await(ticket);
        }
      });
      for (Client* client : {&first, &second}) {
        driver.detach(*client);
        if (!lingers) client->check_not_forgotten();
      }
    }
  }
}

// However long another one stays in turn.
TEST(what_nobody_asks_for_is_looked_at_now_and_then) {
  const auto ends = some_ranks(1);
  const auto other = once_more(ends);
  Client first(*ends[0].transport), second(*other[0].transport);
  first.shy = true;
  second.lingers = true;
  Driver driver(-1, Log{});
  driver.attach(first);
  driver.attach(second);
  CHECK(driver.start());
  first.asked = 1;
  first.await(1);
  driver.detach(first);
  driver.detach(second);
}

// A peer nudges one of several transports; the thread dozes, or waits, on another one.
TEST(a_nudge_is_heard_through_every_transport) {
  for (const bool lingers : {false, true}) {
    const auto whole = some_ranks(2);
    const auto group = once_more(whole), other = once_more(whole);
    Client of_whole(*whole[0].transport), of_group(*group[0].transport), of_other(*other[0].transport);
    of_whole.lingers = lingers;
    Driver driver(-1, Log{});
    for (Client* client : {&of_whole, &of_group, &of_other}) driver.attach(*client);
    CHECK(driver.start());
    for (int round = 1; round <= kRounds; ++round) {
      Client& client = round % 2 ? of_group : of_other;
      client.sleeps_on().alert(true);
      (round % 2 ? group : other)[1].transport->nudge();  // once
      client.await((round + 1) / 2);
      client.sleeps_on().alert(false);
    }
    for (Client* client : {&of_whole, &of_group, &of_other}) {
      driver.detach(*client);
      if (!lingers) client->check_not_forgotten();
    }
  }
}

TEST(what_is_detached_is_left_alone) {
  const auto ends = some_ranks(1);
  Client stays(*ends[0].transport);
  Driver driver(-1, Log{});
  for (const bool with_another : {true, false}) {  // else the thread ends with each
    if (with_another) driver.attach(stays);
    on_threads(3, [&](int) {
      for (int round = 0; round < kRounds / 10; ++round) {
        const auto own = some_ranks(1);
        auto client = std::make_unique<Client>(*own[0].transport);
        client->lingers = round % 3 == 0;
        driver.attach(*client);
        CHECK(driver.start());
        client->asked.fetch_add(1);
        driver.wake();
        if (round % 2) client->await(1);
        driver.detach(*client);
        client->gone = true;
      }
    });
    if (with_another) driver.detach(stays);
  }
}

TEST_MAIN
