// Messages between two ranks: every length, random traffic, any source, lengths that differ; over shared memory, over
// messages alone, and on two levels.
#include "engine/p2p/point_to_point.h"

#include <algorithm>
#include <barrier>
#include <cstring>
#include <deque>
#include <random>
#include <thread>
#include <vector>

#include "base/error.h"
#include "point_messages.h"
#include "support/check.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

using OperationPtr = std::shared_ptr<Operation>;

void barrier(Communicator& comm) { run(comm, {.kind = Kind::kBarrier}); }

constexpr size_t kMost = kSanitized ? size_t{3} << 20 : size_t{9} << 20;
const std::vector<size_t> kSizes = {0,     1,     23,    24,    25,     4095,    4096,          16383, 16384,
                                    16385, 61439, 61440, 61441, 100001, 1 << 20, (1 << 20) + 1, kMost};

// A message that is to be sent; the same list on every rank.
struct Planned {
  int from, to;
  int32_t tag;
  size_t bytes;
  unsigned what;
};

std::vector<Planned> plan_traffic(std::mt19937& random, int ranks, int count) {
  std::vector<Planned> all;
  for (int i = 0; i < count; ++i) {
    const auto below = [&](int limit) { return static_cast<int>(random() % static_cast<unsigned>(limit)); };
    const size_t most = random() % 8 == 0 ? size_t{300000} : random() % 2 ? size_t{40000} : size_t{100};
    all.push_back({below(ranks), below(ranks), below(4) - 1, random() % most, static_cast<unsigned>(i)});
  }
  return all;
}

// A message in whose place memory is on the emulated device.
OperationPtr start_on_device(Communicator& comm, bool sending, std::byte* data, size_t bytes, int peer, uint64_t tag) {
  return comm.submit({.kind = sending ? Kind::kSend : Kind::kReceive,
                      .in = sending ? data : nullptr,
                      .out = sending ? nullptr : data,
                      .count = bytes,
                      .root = peer,
                      .device = device::kEmulated,
                      .tag = tag});
}

// This rank's part of it, in an order of its own: sends to one rank with one tag stay in order, and receives likewise.
// On a device: the memory of every other message, or so.
void run_traffic(Communicator& comm, const std::vector<Planned>& all, unsigned seed, bool on_device = false) {
  std::mt19937 random(seed + static_cast<unsigned>(comm.rank()));
  std::deque<Planned> sends, receives;
  for (const Planned& one : all) {
    if (one.from == comm.rank()) sends.push_back(one);
    if (one.to == comm.rank()) receives.push_back(one);
  }
  std::deque<Bytes> memory;
  struct Begun {
    OperationPtr operation;
    Planned planned;
    std::byte* data;
  };
  std::vector<Begun> begun;
  while (!sends.empty() || !receives.empty()) {
    const bool sending = receives.empty() || (!sends.empty() && random() % 2);
    std::deque<Planned>& list = sending ? sends : receives;
    const Planned next = list.front();
    list.pop_front();
    memory.emplace_back(next.bytes);
    std::byte* data = memory.back().data();
    if (sending) fill(data, next.bytes, next.what);
    const int peer = sending ? next.to : next.from;
    const auto start = [&] {
      if (on_device && random() % 2) return start_on_device(comm, sending, data, next.bytes, peer, key(next.tag));
      return sending ? comm.submit(message(Kind::kSend, data, next.bytes, peer, key(next.tag)))
                     : comm.submit(message(Kind::kReceive, data, next.bytes, peer, key(next.tag)));
    };
    begun.push_back({start(), next, data});
    if (random() % 16 == 0) comm.poll(*begun[random() % begun.size()].operation);
  }
  std::shuffle(begun.begin(), begun.end(), random);
  for (auto& [operation, planned, data] : begun) {
    comm.wait(*operation);
    if (operation->staging != nullptr) operation->staging->wait();
    if (operation->request.kind != Kind::kReceive) continue;
    CHECK_EQ(operation->source, planned.from);
    CHECK(holds(data, planned.bytes, planned.what));
  }
}

}  // namespace

TEST(every_length_from_any_memory) {
  for (const Settings& settings : layouts()) {
    run_ranks(3, settings, [](Communicator& comm) {
      const int next = (comm.rank() + 1) % 3, before = (comm.rank() + 2) % 3;
      const auto mapped_out = comm.alloc(kMost), mapped_in = comm.alloc(kMost);
      Bytes plain_out(kMost), plain_in(kMost);
      for (const size_t bytes : kSizes) {
        for (int memory = 0; memory < 4; ++memory) {
          std::byte* out = memory % 2 ? mapped_out->data() : plain_out.data();
          std::byte* in = memory / 2 ? mapped_in->data() : plain_in.data();
          fill(out, bytes, static_cast<unsigned>(comm.rank()));
          const auto sent = comm.submit(message(Kind::kSend, out, bytes, next, key(memory)));
          const auto received = comm.submit(message(Kind::kReceive, in, bytes, before, key(memory)));
          comm.wait(*received);
          comm.wait(*sent);
          CHECK(holds(in, bytes, static_cast<unsigned>(before)));
          CHECK_EQ(received->source, before);
        }
      }
    });
  }
}

TEST(calls_that_wait) {
  for (const Settings& settings : layouts()) {
    run_ranks(2, settings, [](Communicator& comm) {
      const int peer = 1 - comm.rank();
      Bytes data(kMost);
      for (const size_t bytes : kSizes) {
        for (unsigned round = 0; round < 3; ++round) {
          if (comm.rank() == 0) {
            fill(data.data(), bytes, round);
            send(comm, data.data(), bytes, peer, 5);
            CHECK_EQ(recv(comm, data.data(), bytes, kAnySource, 6), peer);
            CHECK(holds(data.data(), bytes, round + 1));
          } else {
            CHECK_EQ(recv(comm, data.data(), bytes, peer, 5), peer);
            CHECK(holds(data.data(), bytes, round));
            fill(data.data(), bytes, round + 1);
            send(comm, data.data(), bytes, peer, 6);
          }
        }
      }
    });
  }
}

TEST(random_traffic_both_ways) {
  std::mt19937 random(seed());
  for (const Settings& settings : layouts()) {
    for (const int ranks : {1, 2, 3, 5}) {
      const auto all = plan_traffic(random, ranks, kSanitized ? 200 : 1000);
      const unsigned own = random();
      run_ranks(ranks, settings, [&](Communicator& comm) { run_traffic(comm, all, own); });
    }
  }
}

TEST(random_traffic_of_devices) {
  std::mt19937 random(seed());
  for (const Settings& settings : layouts()) {
    for (const int ranks : {1, 3}) {
      const auto all = plan_traffic(random, ranks, kSanitized ? 60 : 200);
      const unsigned own = random();
      run_ranks(ranks, settings, [&](Communicator& comm) { run_traffic(comm, all, own, /*on_device=*/true); });
    }
  }
}

// What the caller's stream still does to the room of a receive comes before what is received.
TEST(a_receive_comes_after_what_is_in_the_callers_stream) {
  for (const Settings& settings : layouts()) {
    run_ranks(2, settings, [](Communicator& comm) {
      constexpr size_t kBytes = 5000;
      Bytes data(kBytes), before(kBytes), taken(kBytes);
      fill(data.data(), kBytes, 1);
      if (comm.rank() == 0) return send(comm, data.data(), kBytes, 1);
      device::Device& device = device::device_of(device::kEmulated);
      const device::Stream stream = device.make_stream();
      for (int i = 0; i < 50; ++i) device.copy(data.data(), before.data(), kBytes, stream);
      const auto received = comm.submit({.kind = Kind::kReceive,
                                         .out = data.data(),
                                         .count = kBytes,
                                         .device = device::kEmulated,
                                         .stream = stream,
                                         .tag = key(0)});
      comm.wait(*received);
      received->staging->hold(stream);
      device.copy(taken.data(), data.data(), kBytes, stream);
      device.wait_for_all();
      CHECK(holds(taken.data(), kBytes, 1));
      device.destroy_stream(stream);
    });
  }
}

TEST(a_device_that_fails_fails_all_ranks) {
  for (const Settings& settings : layouts()) {
    auto world = connect_threads(3, settings);
    std::barrier begun(3);
    on_threads(3, [&](int rank) {
      Communicator& comm = *world[rank];
      Bytes data(1000);
      if (rank == 0) device::fail_emulated_after(1);
      begun.arrive_and_wait();
      if (rank == 1) {
        const auto sent = start_on_device(comm, /*sending=*/true, data.data(), data.size(), 2, key(1));
        CHECK_THROWS(comm.wait(*sent), Error, "a copy or a kernel failed, as a test has asked for (on rank 1)");
      } else {
        CHECK_THROWS(recv(comm, data.data(), data.size(), 1), Error, "(on rank 1)");
      }
      begun.arrive_and_wait();
      if (rank == 0) device::fail_emulated_after(-1);
    });
  }
}

TEST(messages_beside_collectives) {
  std::mt19937 random(seed());
  for (const Settings& settings : layouts()) {
    const auto all = plan_traffic(random, 3, 200);
    const unsigned own = random();
    run_ranks(3, settings, [&](Communicator& comm) {
      // Posted first, met last: neither kind waits for the other.
      Bytes late(1000);
      const auto received =
          comm.submit(message(Kind::kReceive, late.data(), late.size(), (comm.rank() + 1) % 3, key(99)));
      on_threads(2, [&](int thread) {
        if (thread == 0) return run_traffic(comm, all, own);
        std::vector<float> numbers(5000);
        const Call sum{.in = numbers.data(), .out = numbers.data(), .count = numbers.size()};
        for (int round = 0; round < 50; ++round) {
          std::fill(numbers.begin(), numbers.end(), 1.0f);
          if (const auto rest = comm.run_or_submit(sum)) comm.wait(*rest);
          CHECK_EQ(numbers[4999], 3.0f);
          barrier(comm);
        }
      });
      CHECK(!received->done.load());
      barrier(comm);
      const Bytes sent(late.size(), std::byte{7});
      send(comm, sent.data(), sent.size(), (comm.rank() + 2) % 3, 99);
      comm.wait(*received);
      CHECK(late == sent);
    });
  }
}

TEST(any_source_takes_what_comes_first) {
  for (const Settings& settings : layouts()) {
    run_ranks(4, settings, [](Communicator& comm) {
      constexpr int kEach = 20;
      if (comm.rank() > 0) {
        for (int i = 0; i < kEach; ++i) {
          const int numbers[2] = {comm.rank(), i};
          send(comm, numbers, sizeof numbers, 0, 3);
        }
        return;
      }
      std::vector<int> next(4);
      for (int i = 0; i < 3 * kEach; ++i) {
        int numbers[2] = {-1, -1};
        const int source = recv(comm, numbers, sizeof numbers, kAnySource, 3);
        CHECK_EQ(numbers[0], source);
        CHECK_EQ(numbers[1], next[source]++);
      }
    });
  }
}

// Small ones go without a receive, however many; large ones go on while both ranks compute.
TEST(nobody_has_to_wait) {
  for (const Settings& settings : layouts()) {
    run_ranks(2, settings, [](Communicator& comm) {
      const int peer = 1 - comm.rank();
      std::vector<int> numbers(2000), got(2000);
      for (int i = 0; i < 2000; ++i) {
        numbers[i] = i;
        const auto sent = comm.submit(message(Kind::kSend, &numbers[i], sizeof(int), peer, key(1)));
        CHECK(comm.wait_for(*sent, 20));  // though nobody receives yet
      }
      barrier(comm);
      for (int i = 0; i < 2000; ++i) recv(comm, &got[i], sizeof(int), peer, 1);
      CHECK(got == numbers);

      Bytes out(kMost), in(kMost);
      fill(out.data(), kMost, 3);
      const auto sent = comm.submit(message(Kind::kSend, out.data(), kMost, peer, key(2)));
      const auto received = comm.submit(message(Kind::kReceive, in.data(), kMost, peer, key(2)));
      const auto hang = Clock::now() + std::chrono::seconds(30);
      while (!sent->done.load() || !received->done.load()) {
        CHECK(Clock::now() < hang);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      CHECK(holds(in.data(), kMost, 3));
    });
  }
}

TEST(a_receive_with_room_for_more_than_comes) {
  for (const Settings& settings : layouts()) {
    for (const size_t bytes : {size_t{0}, size_t{8}, size_t{20000}, size_t{300000}, size_t{5000000}}) {
      run_ranks(2, settings, [&](Communicator& comm) {
        const size_t room = bytes + 300000;
        Bytes data(room);
        std::fill(data.begin(), data.end(), std::byte{7});
        if (comm.rank() == 0) {
          fill(data.data(), bytes, 3);
          send(comm, data.data(), bytes, 1, 4);
          return send(comm, data.data(), room, 1, 4);  // what comes behind is not mixed up with it
        }
        recv(comm, data.data(), room, 0, 4);
        CHECK(holds(data.data(), bytes, 3));
        CHECK(std::all_of(data.begin() + static_cast<ptrdiff_t>(bytes), data.end(),
                          [](std::byte left) { return left == std::byte{7}; }));
        recv(comm, data.data(), room, 0, 4);
        CHECK(holds(data.data(), bytes, 3));
      });
    }
  }
}

TEST(receives_without_room) {
  for (const Settings& settings : layouts()) {
    for (const size_t bytes : {size_t{8}, size_t{200000}}) {
      run_ranks(3, settings, [&](Communicator& comm) {
        if (comm.rank() == 1) return barrier(comm);
        Bytes data(bytes);
        const int peer = 2 - comm.rank();
        const std::string own = std::to_string(bytes), other = std::to_string(bytes / 2);
        if (comm.rank() == 0) {
          if (bytes > 1000) {
            CHECK_THROWS(send(comm, data.data(), bytes, peer, 4), MismatchError,
                         "send (" + own + " bytes to rank 2, tag 4): rank 2 has room for " + other + " bytes");
            barrier(comm);
          } else {  // it was done, and the next call says so
            send(comm, data.data(), bytes, peer, 4);
            barrier(comm);
            CHECK_THROWS(send(comm, data.data(), bytes, peer, 4), MismatchError,
                         "send (" + own + " bytes to rank 2, tag 4): rank 2 has room for " + other + " bytes");
          }
        } else {
          CHECK_THROWS(recv(comm, data.data(), bytes / 2, peer, 4), MismatchError,
                       "recv (" + other + " bytes from rank 0, tag 4): rank 0 sent " + own + " bytes");
          barrier(comm);
        }
        // The communicator is fine.
        fill(data.data(), bytes, 9);
        if (comm.rank() == 0) return send(comm, data.data(), bytes, peer, 4);
        std::fill(data.begin(), data.end(), std::byte{0});
        recv(comm, data.data(), bytes, peer, 4);
        CHECK(holds(data.data(), bytes, 9));
      });
    }
  }
}

TEST_MAIN
