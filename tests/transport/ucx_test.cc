// Messages over UCX (transport/ucx.h): ranks as threads, each with a worker of its own. Needs the plugin.
#include "transport/ucx.h"

#include <cstring>
#include <map>
#include <mutex>

#include "base/error.h"
#include "support/check.h"
#include "transport/ranks.h"
#include "transport/store.h"

using namespace dcoll;

namespace {

constexpr size_t kLongest = 64 << 10;
constexpr int kSlots = 4;

bool is_built() {
  try {
    ucx();
  } catch (const TransportError& error) {
    test::lacks("ucx", error.what());
    return false;
  }
  return true;
}

KeyValueStore store_of(std::map<std::string, std::vector<std::byte>>& values, std::mutex& mutex) {
  return {.set =
              [&](const std::string& key, const std::vector<std::byte>& value) {
                const std::lock_guard lock(mutex);
                values[key] = value;
              },
          .get = [&](const std::string& key) -> std::optional<std::vector<std::byte>> {
            const std::lock_guard lock(mutex);
            const auto found = values.find(key);
            return found == values.end() ? std::nullopt : std::optional(found->second);
          }};
}

void on_ranks(int n, const std::function<void(Transport&, Bootstrap&)>& body) {
  if (!is_built()) return;
  std::map<std::string, std::vector<std::byte>> values;
  std::mutex mutex;
  test::on_threads(n, [&](int rank) {
    const auto job = make_store_bootstrap(rank, n, store_of(values, mutex));
    StartUp start;
    start.timeout_s = 20;  // should another rank have failed
    job->meet(start);
    const auto transport = job->make_transport(kLongest, kSlots, "keep");
    body(*transport, *job);
  });
}

// Looks until done() holds, and sleeps in between.
void await(Transport& t, const std::function<bool()>& done) {
  const auto deadline = std::chrono::steady_clock::now() + test::kHang;
  while (!done()) {
    if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("hang");
    const uint32_t ticket = t.prepare_wait();
    t.progress();
    if (!done()) t.wait(ticket, std::chrono::seconds(1));
  }
}

}  // namespace

TEST(messages_arrive_whole_and_in_order) {
  for (const int n : {2, 3}) {
    on_ranks(n, [n](Transport& t, Bootstrap& job) {
      const int next = (job.rank() + 1) % n, before = (job.rank() + n - 1) % n;
      uint64_t number = 0;
      for (const size_t bytes : {size_t{1}, size_t{63}, size_t{1000}, size_t{8191}, size_t{60} << 10, kLongest}) {
        for (const int channel : {0, 3, kControlChannel}) {
          for (int i = 0; i < 6; ++i, ++number) {
            const std::vector<std::byte> data = test::message(number, bytes);
            std::vector<std::byte> got(bytes);
            const bool mine = i % 2 == 0;  // in the caller's memory, or in the transport's
            CHECK(t.post_recv(before, channel, mine ? got.data() : nullptr, bytes));
            if (mine) {
              CHECK(t.post_send(next, channel, data.data(), bytes));
            } else {
              std::memcpy(t.acquire_send(next, channel, bytes), data.data(), bytes);
              t.commit_send(next, channel);
            }
            await(t, [&] { return t.front(before, channel) != nullptr; });
            CHECK(test::is_message(t.front(before, channel), number, bytes));
            t.pop(before, channel);
            await(t, [&] { return t.sent(next, channel) == t.posted(next, channel); });
          }
        }
      }
      job.barrier();
    });
  }
}

// The first message to a rank needs looks at its sender, and says so until it is away.
TEST(a_first_message_tells_that_it_waits) {
  on_ranks(2, [](Transport& t, Bootstrap& job) {
    const std::vector<std::byte> data = test::message(1, 100);
    if (job.rank() == 0) CHECK(t.post_send(1, 0, data.data(), data.size()));
    if (job.rank() == 0) CHECK(t.connecting());
    if (job.rank() == 1) CHECK(t.post_recv(0, 0, nullptr, data.size()));
    await(t, [&] { return !t.connecting() && (job.rank() == 0 || t.front(0, 0) != nullptr); });
    if (job.rank() == 1) CHECK(test::is_message(t.front(0, 0), 1, data.size()));
    job.barrier();
    CHECK(!t.connecting());
    await(t, [&] { return t.sent(1 - job.rank(), 0) == t.posted(1 - job.rank(), 0); });
    job.barrier();
  });
}

TEST(as_many_as_there_are_slots_are_under_way) {
  on_ranks(2, [](Transport& t, Bootstrap& job) {
    const int peer = 1 - job.rank();
    const std::vector<std::byte> data = test::message(7, 5000);
    std::vector<std::vector<std::byte>> got(kSlots, std::vector<std::byte>(5000));
    if (job.rank() == 1) job.barrier();  // they come before they are asked for
    for (int i = 0; i < kSlots; ++i) CHECK(t.post_recv(peer, 2, got[static_cast<size_t>(i)].data(), 5000));
    CHECK(!t.post_recv(peer, 2, nullptr, 5000));
    for (int i = 0; i < kSlots; ++i) CHECK(t.post_send(peer, 2, data.data(), 5000));
    if (job.rank() == 0) job.barrier();
    for (int i = 0; i < kSlots; ++i) {
      await(t, [&] { return t.front(peer, 2) != nullptr; });
      CHECK(test::is_message(t.front(peer, 2), 7, 5000));
      t.pop(peer, 2);
    }
    await(t, [&] { return t.sent(peer, 2) == kSlots; });
    job.barrier();
  });
}

TEST(lengths_that_differ_are_told) {
  on_ranks(2, [](Transport& t, Bootstrap& job) {
    const int peer = 1 - job.rank();
    const std::vector<std::byte> data = test::message(1, 100);
    if (job.rank() == 0) {
      CHECK(t.post_recv_up_to(peer, 1, 500));
      await(t, [&] { return t.front(peer, 1) != nullptr; });
      CHECK_EQ(t.front_bytes(peer, 1), 100u);
      t.pop(peer, 1);
      const auto receive = [&](size_t bytes) {
        t.post_recv(peer, 0, nullptr, bytes);
        await(t, [] { return false; });
      };
      CHECK_THROWS(receive(99), TransportError, "UCX receive from rank 1 (channel 0, 99 bytes)");
      CHECK_THROWS(receive(101), TransportError, "sent 100 bytes on channel 0 where 101 were expected");
    } else {
      for (const int channel : {1, 0, 0}) test::send(t, peer, channel, data);
      await(t, [&] { return t.sent(peer, 0) == 2; });
    }
    job.barrier();
  });
}

TEST(ranks_tell_each_other_and_a_farewell_is_no_death) {
  on_ranks(3, [](Transport& t, Bootstrap& job) {
    if (job.rank() == 2) {
      t.post_note(0, "what do you do?");
      t.post_stall({0, 1});
      t.post_failure("out of data");
      for (int look = 0; look < 200; ++look) {
        t.progress();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      job.barrier();
      return;  // closes while the others look
    }
    await(t, [&] { return t.poll_failure() == "out of data" && !t.stall_notes().empty(); });
    CHECK((t.stall_notes().front().waits_for == std::vector<int>{0, 1}));
    if (job.rank() == 0) {
      std::vector<Note> notes;
      await(t, [&] {
        if (notes.empty()) notes = t.take_notes();
        return !notes.empty();
      });
      CHECK(notes.front().text == "what do you do?");
      CHECK_EQ(notes.front().from, 2);
    }
    job.barrier();
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(500);
    while (std::chrono::steady_clock::now() < end) {
      t.progress();
      t.check_peers();
    }
  });
}

// As in a farewell, whose last round a rank may come to when the others have gone.
TEST(what_a_rank_sent_before_it_closed_is_received) {
  on_ranks(2, [](Transport& t, Bootstrap& job) {
    const std::vector<std::byte> data = test::message(3, 1000);
    if (job.rank() == 0) CHECK(t.post_recv(1, 3, nullptr, 1));  // whose connection ends
    job.barrier();
    if (job.rank() == 1) {
      test::send(t, 0, 0, data);
      await(t, [&] { return t.sent(0, 0) == 1; });
      return;  // closes
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(500);
    while (std::chrono::steady_clock::now() < end) t.progress();
    CHECK(t.post_recv(1, 0, nullptr, data.size()));
    await(t, [&] { return t.front(1, 0) != nullptr; });
    CHECK(test::is_message(t.front(1, 0), 3, data.size()));
    CHECK_THROWS(t.post_recv(1, 0, nullptr, data.size()), PeerError, "rank 1 has closed its communicator");
  });
}

// A rank that winds up waits for nobody, and loses nothing: its message needs the peer, which looks at nothing yet.
TEST(ranks_wind_up_by_and_by) {
  on_ranks(2, [](Transport& t, Bootstrap& job) {
    const std::vector<std::byte> data = test::message(5, kLongest);
    if (job.rank() == 0) {
      CHECK(t.post_send(1, 0, data.data(), data.size()));
      for (int time = 0; time < 3; ++time) CHECK(!t.wind_up());
    }
    job.barrier();
    if (job.rank() == 1) {
      CHECK(t.post_recv(0, 0, nullptr, data.size()));
      await(t, [&] { return t.front(0, 0) != nullptr; });
      CHECK(test::is_message(t.front(0, 0), 5, data.size()));
    }
    await(t, [&] { return t.wind_up(); });
    t.progress();
    t.check_peers();
    CHECK(t.wind_up());
  });
}

// The notice of a failure needs a connection, which its peer never makes: it may have failed too.
TEST(a_failed_rank_winds_up_though_a_peer_looks_at_nothing) {
  on_ranks(2, [](Transport& t, Bootstrap& job) {
    if (job.rank() == 0) {
      t.post_failure("out of data");
      CHECK(t.connecting());
      CHECK(!t.wind_up());
      await(t, [&] { return t.wind_up(); });
    }
    job.barrier();
  });
}

// Though it has begun to close.
TEST(a_failure_is_told_to_a_peer_that_looks_later) {
  on_ranks(2, [](Transport& t, Bootstrap& job) {
    if (job.rank() == 0) {
      t.post_failure("out of data");
      CHECK(!t.wind_up());
    }
    job.barrier();
    if (job.rank() == 0) await(t, [&] { return !t.connecting(); });
    if (job.rank() == 1) await(t, [&] { return t.poll_failure() == "out of data"; });
    job.barrier();
  });
}

TEST(a_receive_is_let_go) {
  on_ranks(2, [](Transport& t, Bootstrap& job) {
    std::vector<std::byte> memory(1000);
    CHECK(t.post_recv(1 - job.rank(), 0, memory.data(), memory.size()));
    t.progress();
    CHECK(t.let_go(std::chrono::milliseconds(500)));
    job.barrier();
  });
}

TEST_MAIN
