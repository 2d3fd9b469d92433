// The MPI plugin, run by ctest under `mpirun -n 3` and `-n 1` (messages to oneself go through MPI too). Every wait has
// a deadline, so a rank that fails does not leave the others hanging.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <set>

#include "base/error.h"
#include "support/check.h"
#include "transport/mpi_job.h"

using namespace dcoll;

namespace {

constexpr size_t kMax = 300'001;  // beyond every eager limit, and odd
constexpr int kSlots = 3;

template <class Condition>
void progress_until(Transport& t, const char* what, Condition met) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::seconds(20);
  while (!met()) {
    if (Clock::now() > deadline) throw std::runtime_error(std::string("waited too long for ") + what);
    const uint32_t ticket = t.prepare_wait();
    t.progress();
    if (!met()) t.wait(ticket, std::chrono::milliseconds(1));
  }
}

// A message every rank can predict: depends on who, to whom, where, and the how manieth.
std::vector<std::byte> message(int from, int to, int channel, int number, size_t bytes) {
  std::vector<std::byte> m(bytes);
  uint32_t x = static_cast<uint32_t>(from * 1009 + to * 613 + channel * 211 + number * 31 + 7);
  for (std::byte& b : m) b = static_cast<std::byte>((x = x * 1664525u + 1013904223u) >> 24);
  return m;
}

bool equal(const std::byte* got, const std::vector<std::byte>& want) {
  return std::memcmp(got, want.data(), want.size()) == 0;
}

const std::byte* receive(Transport& t, int peer, int channel) {
  progress_until(t, "a message", [&] { return t.front(peer, channel) != nullptr; });
  return t.front(peer, channel);
}

}  // namespace

TEST(missing_plugin_says_what_to_do) {
  CHECK_THROWS(load_mpi("no/such/libdcoll_mpi.so", StartUp()), TransportError,
               "reinstall dcoll with its mpicc first on PATH");
}

TEST(all_ranks_are_in_one_job) {
  if (const char* expected = std::getenv("DCOLL_TEST_RANKS")) CHECK_EQ(mpi().size(), std::atoi(expected));
}

TEST(backend_facts) {
  CHECK(mpi().rank() >= 0 && mpi().rank() < mpi().size());
  CHECK(mpi().thread_level() >= 2);
  CHECK(mpi().library_path().find("libmpi") != std::string::npos);
  CHECK(!mpi().library_version().empty());
  CHECK(mpi().library_version().find('\n') == std::string::npos);
  CHECK(!mpi().processor_name().empty());
  const std::vector<int> nodes = mpi().node_of_ranks();
  CHECK_EQ(nodes.size(), static_cast<size_t>(mpi().size()));
  for (const int node : nodes) CHECK_EQ(node, 0);
}

TEST(every_size_arrives_in_order) {
  const auto t = mpi().make_transport(kMax, kSlots, "auto");
  CHECK_EQ(t->rank(), mpi().rank());
  CHECK_EQ(t->size(), mpi().size());
  CHECK_EQ(t->max_message_bytes(), kMax);
  const int next = (t->rank() + 1) % t->size(), previous = (t->rank() + t->size() - 1) % t->size();
  const size_t sizes[] = {1, 2, 3, 63, 64, 65, 4095, 4097, 65536, 65537, kMax - 1, kMax};
  for (const int channel : {0, kMaxChannels - 1, kControlChannel}) {
    int number = 0;
    for (const size_t bytes : sizes) {
      const auto out = message(t->rank(), next, channel, number, bytes);
      std::vector<std::byte> in(bytes + 1, std::byte{0xEE});
      CHECK(t->post_recv(previous, channel, in.data(), bytes));
      CHECK(t->post_send(next, channel, out.data(), bytes));
      CHECK_EQ(t->posted(next, channel), static_cast<uint64_t>(number + 1));
      const std::byte* got = receive(*t, previous, channel);
      CHECK(got == in.data());
      CHECK(equal(got, message(previous, t->rank(), channel, number, bytes)));
      CHECK(in[bytes] == std::byte{0xEE});
      t->pop(previous, channel);
      CHECK(t->front(previous, channel) == nullptr);
      ++number;
      progress_until(*t, "the send", [&] { return t->sent(next, channel) == t->posted(next, channel); });
    }
  }
  CHECK_EQ(t->posted(next, 3), 0u);
  CHECK_EQ(t->sent(next, 3), 0u);
  mpi().barrier();
}

TEST(slots_limit_what_is_in_flight) {
  const auto t = mpi().make_transport(kMax, kSlots, "auto");
  const int next = (t->rank() + 1) % t->size(), previous = (t->rank() + t->size() - 1) % t->size();
  const std::vector<std::byte> out(kMax, std::byte{5});
  for (int i = 0; i < kSlots; ++i) CHECK(t->post_send(next, 1, out.data(), kMax));
  // Without progress() no slot can have become free.
  CHECK(!t->post_send(next, 1, out.data(), kMax));
  CHECK(t->acquire_send(next, 1, 1) == nullptr);
  CHECK_EQ(t->posted(next, 1), static_cast<uint64_t>(kSlots));
  for (int i = 0; i < kSlots; ++i) CHECK(t->post_recv(previous, 1, nullptr, kMax));
  CHECK(!t->post_recv(previous, 1, nullptr, kMax));
  for (int i = 0; i < kSlots; ++i) {
    CHECK(equal(receive(*t, previous, 1), out));
    t->pop(previous, 1);
  }
  progress_until(*t, "the sends", [&] { return t->sent(next, 1) == kSlots; });
  // Room acquired counts as a slot, and is the same room until it is committed.
  std::byte* room = t->acquire_send(next, 1, 10);
  CHECK(room != nullptr);
  CHECK(t->acquire_send(next, 1, 2) == room);
  CHECK(t->post_send(next, 1, out.data(), 1));
  CHECK(t->post_send(next, 1, out.data(), 1));
  CHECK(!t->post_send(next, 1, out.data(), 1));
  room[0] = std::byte{8};
  room[1] = std::byte{9};
  t->commit_send(next, 1);
  CHECK_EQ(t->posted(next, 1), static_cast<uint64_t>(2 * kSlots));
  CHECK_THROWS(t->commit_send(next, 1), ArgumentError, "without acquire_send");
  CHECK(t->post_recv(previous, 1, nullptr, 1));
  CHECK(t->post_recv(previous, 1, nullptr, 1));
  CHECK(t->post_recv(previous, 1, nullptr, 2));
  for (int i = 0; i < 2; ++i) {
    CHECK(*receive(*t, previous, 1) == std::byte{5});
    t->pop(previous, 1);
  }
  CHECK(equal(receive(*t, previous, 1), {std::byte{8}, std::byte{9}}));
  t->pop(previous, 1);
  progress_until(*t, "the sends", [&] { return t->sent(next, 1) == 2 * kSlots; });
  mpi().barrier();
}

// The sender destroys its memory as soon as sent() allows; the receiver, which posts late, still gets the bytes.
TEST(memory_is_free_once_sent) {
  const auto t = mpi().make_transport(kMax, kSlots, "auto");
  const int next = (t->rank() + 1) % t->size(), previous = (t->rank() + t->size() - 1) % t->size();
  for (int round = 0; round < 8; ++round) {
    auto out = message(t->rank(), next, 2, round, kMax);
    CHECK(t->post_send(next, 2, out.data(), kMax));
    bool sent = false;
    const auto overwrite_when_sent = [&] {
      if (!sent && t->sent(next, 2) == static_cast<uint64_t>(round + 1)) {
        sent = true;
        std::memset(out.data(), 0xDD, out.size());
      }
    };
    overwrite_when_sent();
    mpi().barrier();  // nobody posts a receive before everybody has sent
    t->progress();
    overwrite_when_sent();
    CHECK(t->post_recv(previous, 2, nullptr, kMax));
    progress_until(*t, "message and send", [&] {
      overwrite_when_sent();
      return sent && t->front(previous, 2) != nullptr;
    });
    CHECK(equal(t->front(previous, 2), message(previous, t->rank(), 2, round, kMax)));
    t->pop(previous, 2);
  }
  mpi().barrier();
}

// Everybody sends to everybody on several channels at once, sizes mixed, half of the messages composed in the
// transport.
TEST(flood_in_all_directions) {
  constexpr int kMessages = 60, kChannels = 3;
  const auto size_of = [](int number) { return static_cast<size_t>(1 + (number * 7919) % 20'000); };
  const auto t = mpi().make_transport(20'000, kSlots, "auto");
  const int n = t->size();
  struct Lane {
    int sent = 0, receives = 0, received = 0;
    std::vector<std::vector<std::byte>> out, in;
  };
  std::vector<Lane> lanes(static_cast<size_t>(n * kChannels));
  for (Lane& lane : lanes) lane.out.resize(kMessages), lane.in.resize(kMessages);
  int open = 2 * n * kChannels * kMessages;
  progress_until(*t, "the flood to end", [&] {
    for (int peer = 0; peer < n; ++peer) {
      for (int channel = 0; channel < kChannels; ++channel) {
        Lane& lane = lanes[static_cast<size_t>(peer * kChannels + channel)];
        for (; lane.sent < kMessages; ++lane.sent, --open) {
          std::vector<std::byte>& out = lane.out[static_cast<size_t>(lane.sent)];
          out = message(t->rank(), peer, channel, lane.sent, size_of(lane.sent));
          if (lane.sent % 2 == 0) {
            if (!t->post_send(peer, channel, out.data(), out.size())) break;
            continue;
          }
          std::byte* room = t->acquire_send(peer, channel, out.size());
          if (room == nullptr) break;
          std::memcpy(room, out.data(), out.size());
          t->commit_send(peer, channel);
        }
        for (; lane.receives < kMessages; ++lane.receives) {
          std::vector<std::byte>& in = lane.in[static_cast<size_t>(lane.receives)];
          in.resize(size_of(lane.receives));
          if (!t->post_recv(peer, channel, lane.receives % 3 == 0 ? nullptr : in.data(), in.size())) break;
        }
        for (; const std::byte* got = t->front(peer, channel); ++lane.received, --open) {
          CHECK(equal(got, message(peer, t->rank(), channel, lane.received, size_of(lane.received))));
          t->pop(peer, channel);
        }
      }
    }
    return open == 0;
  });
  for (int peer = 0; peer < n; ++peer) {
    progress_until(*t, "the sends", [&] { return t->sent(peer, 0) == kMessages; });
  }
  mpi().barrier();
}

TEST(wrong_lengths_name_the_peer) {
  for (const size_t bytes : {size_t{3}, size_t{5}}) {
    if (bytes > 4 && mpi().size() == 1) continue;  // Open MPI truncates a message to oneself without an error
    const auto t = mpi().make_transport(64, kSlots, "auto");
    const int next = (t->rank() + 1) % t->size(), previous = (t->rank() + t->size() - 1) % t->size();
    const std::vector<std::byte> out(bytes);
    CHECK(t->post_recv(previous, 0, nullptr, 4));
    CHECK(t->post_send(next, 0, out.data(), bytes));
    CHECK_THROWS(receive(*t, previous, 0), TransportError, "rank " + std::to_string(previous));
    mpi().barrier();
  }
}

TEST(lengths_only_the_sender_knows) {
  const auto t = mpi().make_transport(64, kSlots, "auto");
  const int next = (t->rank() + 1) % t->size(), previous = (t->rank() + t->size() - 1) % t->size();
  for (const size_t bytes : {1, 17, 64}) {
    const auto out = message(t->rank(), next, 0, 1, bytes);
    CHECK(t->post_recv_up_to(previous, 0, 64));
    CHECK(t->post_send(next, 0, out.data(), bytes));
    CHECK(equal(receive(*t, previous, 0), message(previous, t->rank(), 0, 1, bytes)));
    CHECK_EQ(t->front_bytes(previous, 0), bytes);
    t->pop(previous, 0);
    progress_until(*t, "the send", [&] { return t->sent(next, 0) == t->posted(next, 0); });
  }
  mpi().barrier();
}

TEST(a_stalled_rank_says_so_to_all) {
  const auto t = mpi().make_transport(16, kSlots, "auto");
  const auto begin = Clock::now();
  for (int again = 1; again <= 3; ++again) {
    t->post_stall({t->rank(), again});
    progress_until(*t, "the others' words", [&] {
      int heard = 0;
      for (const StallNote& note : t->stall_notes()) {
        heard += note.waits_for == std::vector<int>{note.rank, again} && note.heard >= begin;
      }
      return heard == t->size() - 1;
    });
    CHECK_EQ(t->stall_notes().size(), static_cast<size_t>(t->size() - 1));
    mpi().barrier();
  }
}

TEST(notes_reach_a_rank_that_expects_nothing) {
  const auto t = mpi().make_transport(16, kSlots, "auto");
  const int next = (t->rank() + 1) % t->size(), previous = (t->rank() + t->size() - 1) % t->size();
  CHECK(t->take_notes().empty());
  mpi().barrier();
  std::vector<std::string> heard;
  for (int again = 0; again < 3; ++again) t->post_note(next, "note " + std::to_string(again));
  t->post_note(next, std::string(3000, 'x'));
  progress_until(*t, "the notes", [&] {
    for (const Note& note : t->take_notes()) {
      CHECK_EQ(note.from, previous);
      heard.push_back(note.text);
    }
    return heard.size() == 4;
  });
  CHECK(heard == (std::vector<std::string>{"note 0", "note 1", "note 2", std::string(Transport::kMostNoteBytes, 'x')}));
  mpi().barrier();
}

TEST(impossible_arguments_are_refused) {
  CHECK_THROWS(mpi().make_transport(0, 1, "auto"), ArgumentError, "at least 1 slot");
  CHECK_THROWS(mpi().make_transport(16, kSlots, "swift"), ArgumentError,
               "DCOLL_TCP_CONGESTION='swift' is not possible");
  const auto t = mpi().make_transport(16, kSlots, "auto");
  std::byte data[17] = {};
  CHECK_THROWS(t->post_send(t->size(), 0, data, 1), ArgumentError, "does not exist");
  CHECK_THROWS(t->post_send(-1, 0, data, 1), ArgumentError, "does not exist");
  CHECK_THROWS(t->post_send(0, kAllChannels, data, 1), ArgumentError, "does not exist");
  CHECK_THROWS(t->post_send(0, 0, data, 0), ArgumentError, "1 to 16 bytes");
  CHECK_THROWS(t->post_recv(0, 0, data, 17), ArgumentError, "1 to 16 bytes");
  CHECK_THROWS(t->pop(0, 0), ArgumentError, "has not arrived");
  mpi().barrier();
}

TEST(waiting_ends) {
  const auto t = mpi().make_transport(16, kSlots, "auto");
  const uint32_t before = t->prepare_wait();
  t->wake();
  CHECK(t->prepare_wait() != before);
  t->wait(before, std::chrono::hours(1));
  for (int i = 0; i < 200; ++i) t->wait(t->prepare_wait(), std::chrono::hours(1));  // nothing comes, and it returns
  t->wait(t->prepare_wait(), std::chrono::microseconds(-1));
  t->check_peers();
  mpi().barrier();
}

TEST(waiting_beside_a_bell) {
  struct Counting final : Bell {
    Fd fd = make_bell();
    bool quiet = true;
    int begun = 0, ended = 0;
    int descriptor() const override { return fd.get(); }
    bool begin_wait(uint32_t ticket) override {
      begun += quiet;
      return quiet && ticket == 7;
    }
    void end_wait() override { ++ended; }
  } bell;
  const auto t = mpi().make_transport(16, kSlots, "auto");
  ring_bell(bell.descriptor());
  CHECK(t->wait_beside(bell, 7, std::chrono::hours(1)));
  uint64_t count = 0;
  CHECK(read(bell.descriptor(), &count, sizeof count) < 0);  // the ring was taken
  CHECK(t->wait_beside(bell, 7, std::chrono::hours(1)));     // nothing comes, and it returns
  CHECK_EQ(bell.begun, 2);
  CHECK_EQ(bell.ended, 2);
  bell.quiet = false;
  CHECK(t->wait_beside(bell, 7, std::chrono::hours(1)));
  CHECK_EQ(bell.ended, 2);
  mpi().barrier();
}

TEST(failure_reaches_everyone_once) {
  const auto t = mpi().make_transport(16, kSlots, "auto");
  const int culprit = t->size() - 1;
  // 5000 two-byte letters behind one byte: cutting in the middle of a letter would be noticed.
  std::string text = "x";
  for (int i = 0; i < 5000; ++i) text += "\xC3\xA9";
  CHECK(t->poll_failure().empty());
  if (t->rank() == culprit) {
    t->post_failure(text);
    t->post_failure("a later cause");
  } else {
    progress_until(*t, "the notice", [&] { return !t->poll_failure().empty(); });
    const std::string got = t->poll_failure();
    CHECK(got.size() >= 1000 && got.size() % 2 == 1);
    CHECK(text.compare(0, got.size(), got) == 0);
  }
  mpi().barrier();
}

TEST(everyone_may_fail_at_once) {
  const auto t = mpi().make_transport(16, kSlots, "auto");
  t->post_failure("rank " + std::to_string(t->rank()) + " failed");
  if (t->size() > 1) {
    progress_until(*t, "a notice", [&] { return !t->poll_failure().empty(); });
    CHECK(t->poll_failure().find(" failed") != std::string::npos);
    CHECK(t->poll_failure() != "rank " + std::to_string(t->rank()) + " failed");
  }
  mpi().barrier();
}

// After a failure the caller has its memory back while peers may still send what was due.
TEST(letting_go_takes_memory_back) {
  for (const size_t bytes : {size_t{1000}, kMax}) {  // eager, and by a handshake
    const auto t = mpi().make_transport(kMax, kSlots, "auto");
    const int next = (t->rank() + 1) % t->size(), previous = (t->rank() + t->size() - 1) % t->size();
    const std::vector<std::byte> out(bytes, std::byte{1}), untouched(bytes, std::byte{7});
    std::vector<std::byte> in = untouched;
    CHECK(t->post_recv(previous, 0, in.data(), bytes));
    CHECK(t->let_go(std::chrono::milliseconds(500)));
    mpi().barrier();
    CHECK(t->post_send(next, 0, out.data(), bytes));
    for (int i = 0; i < 100; ++i) t->progress();
    mpi().barrier();
    for (int i = 0; i < 100; ++i) t->progress();
    CHECK(in == untouched);
    t->let_go(std::chrono::milliseconds(20));  // of `out`, which nobody will ever take: it may fail, but must end
  }
}

TEST(closing_leaves_nothing_behind) {
  // Communicators must be given back: MPIs have few thousand of them.
  for (int i = 0; i < 50; ++i) {
    const auto t = mpi().make_transport(kMax, kSlots, "auto");
    for (int peer = 0; peer < t->size(); ++peer) CHECK(t->post_recv(peer, 0, nullptr, kMax));
    CHECK(t->acquire_send(0, 0, 5) != nullptr);
  }
  // A message nobody will receive: closing gives up on it.
  const std::vector<std::byte> out(kMax);
  const auto t = mpi().make_transport(kMax, kSlots, "auto");
  CHECK(t->post_send((t->rank() + 1) % t->size(), 0, out.data(), kMax));
  mpi().barrier();
}

int main(int argc, char** argv) {
  const int status = dcoll::test::run(argc, argv);
  if (status != 0) mpi().abort(status);
  // Finalizing with a transport open and receives posted must end; afterwards the transport may still be destroyed.
  auto left_open = mpi().make_transport(kMax, kSlots, "auto");
  std::vector<std::byte> in(kMax);
  left_open->post_recv(0, 0, in.data(), kMax);
  mpi().finalize();
  mpi().finalize();
  CHECK_THROWS(left_open->post_recv(0, 0, in.data(), kMax), TransportError, "closed");
  left_open.reset();
  CHECK_THROWS(load_mpi(plugin_path(), StartUp()), TransportError, "finalized already");
  return 0;
}
