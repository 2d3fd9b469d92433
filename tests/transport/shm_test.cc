// Shared memory between real processes. Every rank is a forked child that reports by its exit status; the parent
// never connects, so it never has threads or mappings to inherit.
#include "transport/mapped/shm.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>

#include "base/error.h"
#include "support/check.h"
#include "transport/mapped/shm_mesh.h"
#include "transport/os/processes.h"
#include "transport/os/siphash.h"
#include "transport/ranks.h"

using namespace dcoll;
using namespace dcoll::test;
using std::chrono::milliseconds;

namespace {

constexpr milliseconds kPatience = kHang;

MappedOptions small() { return {.arena_bytes = 1 << 20, .slot_bytes = 3000, .slots = 2}; }

Endpoint connect_shm(ShmPeers peers, const MappedOptions& options, milliseconds deadline) {
  return ShmRegion(std::move(peers), options).connect(deadline);
}

// A key nobody else on this machine uses: tests may run side by side.
SipKey fresh_key() {
  static uint32_t count = 0;
  SipKey key{};
  const uint32_t pid = static_cast<uint32_t>(getpid());
  std::memcpy(key.data(), &pid, 4);
  std::memcpy(key.data() + 4, &++count, 4);
  return key;
}

pid_t start(const std::function<void()>& body) {
  std::fflush(stdout);
  const pid_t pid = fork();
  if (pid != 0) return pid;
  int status = 1;
  try {
    body();
    status = 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "  in child: %s\n", e.what());
  }
  _exit(status);
}

// 0 when the child succeeded.
int finish(pid_t child) {
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return status;
}

// body(rank) in n processes; all must succeed.
void run_processes(int n, const std::function<void(int)>& body) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < n; ++rank) children.push_back(start([&body, rank] { body(rank); }));
  bool good = true;
  for (const pid_t child : children) good = finish(child) == 0 && good;
  CHECK(good);
}

void barrier(Transport& t) {
  for (int peer = 0; peer < t.size(); ++peer) send(t, peer, kControlChannel, {std::byte{1}});
  for (int peer = 0; peer < t.size(); ++peer) receive(t, peer, kControlChannel, 1);
}

// What check_peers says as soon as it says something.
std::string bad_news(Transport& t, milliseconds within) {
  const auto deadline = std::chrono::steady_clock::now() + within;
  while (std::chrono::steady_clock::now() < deadline) {
    try {
      t.check_peers();
    } catch (const PeerError& e) {
      return e.what();
    }
    t.wait(t.prepare_wait(), milliseconds(10));
  }
  return "";
}

int entries_in_dev_shm() {
  if (!std::filesystem::exists("/dev/shm")) return 0;
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    count += entry.path().filename().string().find("dcoll") != std::string::npos;
  }
  return count;
}

Fd raw_connection(const std::string& name) {
  const auto deadline = std::chrono::steady_clock::now() + kHang;
  while (std::chrono::steady_clock::now() < deadline) {
    if (Fd connected = connect_to(name)) return connected;
    std::this_thread::sleep_for(milliseconds(1));
  }
  throw std::runtime_error("nobody listens at " + name);
}

}  // namespace

TEST(siphash_matches_the_paper) {
  SipKey key;
  std::vector<uint8_t> text(15);  // appendix A: key 00 .. 0f, message 00 .. 0e
  for (size_t i = 0; i < key.size(); ++i) key[i] = static_cast<uint8_t>(i);
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<uint8_t>(i);
  CHECK_EQ(siphash(key, text.data(), text.size()), uint64_t{0xa129ca6149be45e5});
  CHECK_EQ(siphash(key, nullptr, 0), uint64_t{0x726fdb47dd0e0e31});
}

TEST(traffic_between_processes) {
  for (const int n : {1, 2, 3, 5}) {
    const SipKey key = fresh_key();
    run_processes(n, [&](int rank) {
      Endpoint end = connect_shm({rank, n, key}, small(), kPatience);
      Transport& t = *end.transport;
      CHECK_EQ(std::string(t.name()), std::string("shm"));
      for (uint64_t k = 0; k < 50; ++k) {
        const size_t bytes = 1 + k * 61 % 3000;
        for (int peer = 0; peer < n; ++peer) send(t, peer, 1, message(k + static_cast<uint64_t>(rank), bytes));
        for (int peer = 0; peer < n; ++peer) {
          CHECK(receive(t, peer, 1, bytes) == message(k + static_cast<uint64_t>(peer), bytes));
        }
      }
      t.check_peers();
      barrier(t);
    });
  }
}

// `sleep` as rank 0 does; rank 1 sleeps on its doorbell.
void wake_each_other(void (*sleep)(Transport&, const std::function<bool()>&)) {
  const SipKey key = fresh_key();
  run_processes(2, [&](int rank) {
    Endpoint end = connect_shm({rank, 2, key}, small(), kPatience);
    Transport& t = *end.transport;
    const auto asleep = rank == 0 ? sleep : sleep_until;
    for (int k = 0; k < 3000; ++k) {
      if (k % 2 == rank) {
        asleep(t, [&] { return t.post_send(1 - rank, 0, &k, sizeof(k)); });
      } else {
        int got = -1;
        CHECK(t.post_recv(1 - rank, 0, &got, sizeof(got)));
        asleep(t, [&] { return t.front(1 - rank, 0) != nullptr; });
        t.pop(1 - rank, 0);
        CHECK_EQ(got, k);
      }
    }
    barrier(t);
  });
}

TEST(processes_sleep_and_wake_each_other) { wake_each_other(sleep_until); }

TEST(processes_ring_each_others_bells) { wake_each_other(sleep_on_bell_until); }

TEST(windows_show_the_same_memory) {
  constexpr int n = 3;
  const SipKey key = fresh_key();
  run_processes(n, [&](int rank) {
    Endpoint end = connect_shm({rank, n, key}, small(), kPatience);
    Window& w = *end.window;
    std::byte* block = w.alloc(5000);
    const auto data = message(static_cast<uint64_t>(rank), 5000);
    std::memcpy(block, data.data(), 5000);
    w.board(rank).record[1].post.offset_in = w.offset_of(block, 5000);
    w.board(rank).record[1].ticket.store(1, std::memory_order_release);
    w.notify_all();
    for (int peer = 0; peer < n; ++peer) {
      sleep_until(*end.transport, [&] { return w.board(peer).record[1].ticket.load(std::memory_order_acquire) == 1; });
      CHECK(is_message(w.base(peer) + w.board(peer).record[1].post.offset_in, static_cast<uint64_t>(peer), 5000));
    }
    barrier(*end.transport);
    w.free(block);
    std::byte* again = w.alloc(5000);
    CHECK(again == block);
    for (size_t i = 0; i < 5000; ++i) CHECK_EQ(static_cast<int>(again[i]), 0);
  });
}

TEST(killed_process_is_noticed_and_leaves_nothing) {
  const SipKey key = fresh_key();
  const pid_t victim = start([&] {
    Endpoint end = connect_shm({2, 3, key}, small(), kPatience);
    barrier(*end.transport);
    pause();
  });
  auto survivor = [&](int rank) {
    return start([&, rank] {
      Endpoint end = connect_shm({rank, 3, key, {4, 6, 9}}, small(), kPatience);  // messages name the job's ranks
      barrier(*end.transport);
      // Not before rank 1 too has heard from the victim, else it waits in the barrier for what was never sent.
      if (rank == 1) send(*end.transport, 0, 1, message(0, 1));
      if (rank == 0) {
        receive(*end.transport, 1, 1, 1);
        kill(victim, SIGKILL);
      }
      const std::string news = bad_news(*end.transport, kPatience);
      CHECK_EQ(news,
               "rank 9 (pid " + std::to_string(victim) + ") died: its process ended without closing its communicator");
      end.transport->post_failure("rank 2 died");  // stay until the other has seen it too, else it sees us closing
      poll_until([&] { return !end.transport->poll_failure().empty(); });
    });
  };
  const pid_t a = survivor(0), b = survivor(1);
  CHECK_EQ(finish(a), 0);
  CHECK_EQ(finish(b), 0);
  CHECK(WIFSIGNALED(finish(victim)));
  CHECK_EQ(entries_in_dev_shm(), 0);
}

// A data loader's worker holds copies of its parent's sockets; the parent's death must be seen all the same.
TEST(death_is_noticed_though_a_forked_child_lives_on) {
  if (!open_pidfd(getpid())) return lacks("pidfd", "only sockets tell on this kernel, and they cannot tell this");
  const SipKey key = fresh_key();
  int from_child[2];
  CHECK(pipe2(from_child, O_CLOEXEC) == 0);
  const pid_t victim = start([&] {
    Endpoint end = connect_shm({1, 2, key}, small(), kPatience);
    const pid_t worker = fork();
    if (worker == 0) {
      for (;;) pause();
    }
    CHECK(write(from_child[1], &worker, sizeof(worker)) == sizeof(worker));
    barrier(*end.transport);
    for (;;) pause();
  });
  const pid_t survivor = start([&] {
    Endpoint end = connect_shm({0, 2, key}, small(), kPatience);
    barrier(*end.transport);
    end.transport->check_peers();
    kill(victim, SIGKILL);
    CHECK(bad_news(*end.transport, kPatience).find("local rank 1") == 0);
  });
  pid_t worker = 0;
  CHECK(read(from_child[0], &worker, sizeof(worker)) == sizeof(worker));
  const int status = finish(survivor);
  kill(worker, SIGKILL);
  finish(victim);
  CHECK_EQ(status, 0);
  close(from_child[0]);
  close(from_child[1]);
}

TEST(end_of_a_forked_child_is_not_the_end_of_its_rank) {
  const SipKey key = fresh_key();
  run_processes(2, [&](int rank) {
    Endpoint end = connect_shm({rank, 2, key}, small(), kPatience);
    barrier(*end.transport);
    if (rank == 1) {
      const pid_t child = start([&] { end.transport.reset(); });
      CHECK_EQ(finish(child), 0);
    }
    barrier(*end.transport);
    end.transport->check_peers();
    barrier(*end.transport);
  });
}

TEST(closing_differs_from_dying) {
  const SipKey key = fresh_key();
  run_processes(2, [&](int rank) {
    Endpoint end = connect_shm({rank, 2, key}, small(), kPatience);
    if (rank == 1) return;
    const std::string news = bad_news(*end.transport, kPatience);
    CHECK(news.find("closed its communicator") != std::string::npos);
    CHECK(news.find("died") == std::string::npos);
  });
}

TEST(missing_peers_are_named_at_the_deadline) {
  const SipKey key = fresh_key();
  run_processes(2, [&](int rank) {  // of four
    const milliseconds limit(rank == 0 ? 300 : 5000);
    const std::string expected = rank == 0 ? "local rank 0 could not reach local rank(s) 2, 3 within 300 ms"
                                           : "gave up or died while the local ranks were connecting";
    CHECK_THROWS(connect_shm({rank, 4, key}, small(), limit), TransportError, expected);
  });
}

// Whichever descriptor is the one too many: the rank says so, and looks for nobody until the deadline.
TEST(too_few_descriptors_are_told_at_once) {
  if (kSanitized) return lacks("no sanitizer", "UBSan needs descriptors of its own");
  for (rlim_t room = 3; room < 12; ++room) {
    const SipKey key = fresh_key();
    const auto connect = [&](int rank) { connect_shm({rank, 2, key}, small(), kPatience); };
    const pid_t other = start([&] { connect(0); });
    const pid_t poor = start([&] {
      const int next = dup(0);
      close(next);
      const rlimit limit{static_cast<rlim_t>(next) + room, static_cast<rlim_t>(next) + room};
      CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
      try {
        connect(1);
      } catch (const TransportError& e) {
        if (std::string(e.what()).find("open files") == std::string::npos) throw;
      }
    });
    const int status = finish(poor);
    kill(other, SIGKILL);
    finish(other);
    CHECK_EQ(status, 0);
  }
}

TEST(the_limit_on_open_files_is_raised_where_that_is_allowed) {
  if (kSanitized) return lacks("no sanitizer", "UBSan needs descriptors of its own");
  run_processes(2, [key = fresh_key()](int rank) {
    rlimit files{};
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
    files.rlim_cur = static_cast<rlim_t>(dup(0)) + 2;  // room for its memory alone
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
    connect_shm({rank, 2, key}, small(), kPatience);
  });
}

TEST(another_key_is_another_job) {
  const SipKey key = fresh_key(), other = fresh_key();
  run_processes(2, [&](int rank) {
    CHECK_THROWS(connect_shm({rank, 2, rank == 0 ? key : other}, small(), milliseconds(300)), TransportError,
                 "could not reach local rank(s) " + std::to_string(1 - rank));
  });
}

TEST(different_layouts_are_told_with_both_values) {
  const SipKey key = fresh_key();
  run_processes(2, [&](int rank) {
    MappedOptions options = small();
    if (rank == 1) options.slots = 5;
    CHECK_THROWS(connect_shm({rank, 2, key}, options, kPatience), TransportError,
                 rank == 0 ? "slots (DCOLL_SLOTS): local rank 0 has 2, local rank 1 (pid "
                           : "slots (DCOLL_SLOTS): local rank 1 has 5, local rank 0 (pid ");
  });
  const SipKey second = fresh_key();
  run_processes(2, [&](int rank) {
    MappedOptions options = small();
    if (rank == 0) options.arena_bytes *= 2;
    CHECK_THROWS(connect_shm({rank, 2, second}, options, kPatience), TransportError,
                 "arena bytes (DCOLL_ARENA_MB): local rank " + std::to_string(rank) + " has");
  });
  const SipKey third = fresh_key();
  run_processes(2, [&](int rank) {
    CHECK_THROWS(connect_shm({rank, 2 + rank, third}, small(), kPatience), TransportError,
                 "the number of local ranks: local rank");
  });
}

TEST(two_processes_cannot_be_the_same_rank) {
  const SipKey key = fresh_key();
  const Fd squatter = listen_at(mesh_address(key, 0), 1);
  CHECK_THROWS(connect_shm({0, 2, key}, small(), milliseconds(300)), TransportError, "in use");
  CHECK_THROWS(connect_shm({2, 2, key}, small(), milliseconds(300)), ArgumentError, "local rank 2 does not exist");
}

// Strangers of the same user that know the socket's name (it is listed in /proc/net/unix) but not the key.
TEST(strangers_are_dropped_and_get_nothing) {
  const SipKey key = fresh_key();
  const std::string name = mesh_address(key, 0);
  const pid_t rank0 = start([&] {
    Endpoint end = connect_shm({0, 2, key}, small(), kPatience);
    barrier(*end.transport);
  });
  const pid_t stranger = start([&] {
    const Fd silent = raw_connection(name);  // connects, says nothing, stays
    const Fd noisy = raw_connection(name);
    CHECK(send_packet(noisy, "GET / HTTP/1.1", 14));
    // One that speaks the protocol: echoes Hello as another rank, and proves nothing.
    const Fd liar = raw_connection(name);
    struct {
      uint64_t magic;
      uint32_t version;
      int32_t local_rank;
      unsigned char rest[40];
    } hello;
    Received got = Received::kNothingYet;
    poll_until([&] { return (got = receive_packet(liar, &hello, sizeof(hello))) != Received::kNothingYet; });
    CHECK(got == Received::kPacket);
    hello.local_rank = 1;
    CHECK(send_packet(liar, &hello, sizeof(hello)));
    uint64_t proof[2];
    poll_until([&] { return (got = receive_packet(liar, proof, sizeof(proof))) != Received::kNothingYet; });
    CHECK(got == Received::kPacket);
    CHECK(send_packet(liar, proof, sizeof(proof)));  // reflected: its own proof
    Fd passed;
    uint64_t segment[2];
    poll_until([&] {
      return (got = receive_packet(liar, segment, sizeof(segment), std::span(&passed, 1))) != Received::kNothingYet;
    });
    CHECK(got == Received::kClosed);
    CHECK(!passed);
    poll_until([&] { return (got = receive_packet(noisy, &hello, sizeof(hello))) != Received::kNothingYet; });
    poll_until([&] { return (got = receive_packet(noisy, &hello, sizeof(hello))) != Received::kNothingYet; });
    CHECK(got == Received::kClosed);
    const pid_t rank1 = start([&] {  // and the real peer is served
      Endpoint end = connect_shm({1, 2, key}, small(), kPatience);
      barrier(*end.transport);
    });
    CHECK_EQ(finish(rank1), 0);
  });
  CHECK_EQ(finish(stranger), 0);
  CHECK_EQ(finish(rank0), 0);
}

TEST(only_proper_segments_are_mapped) {
  const RegionLayout layout(2, small());
  CHECK_THROWS(map_segment(create_segment(layout.region_bytes), layout, 1), TransportError, "begin with its header");
  CHECK_THROWS(map_segment(create_segment(layout.region_bytes - 4096), layout, 1), TransportError, "bytes instead of");
  const Fd unsealed(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK(ftruncate(unsealed.get(), static_cast<off_t>(layout.region_bytes)) == 0);
  CHECK_THROWS(map_segment(unsealed, layout, 1), TransportError, "not sealed");
  const Fd sealed = create_segment(layout.region_bytes);
  CHECK(ftruncate(sealed.get(), 4096) != 0);
}

TEST(shared_memory_cannot_be_made_executable) {
  constexpr unsigned kNoExecSeal = 8;
  constexpr int kSealExec = 0x20;
  if (!Fd(memfd_create("probe", MFD_CLOEXEC | kNoExecSeal))) return lacks("memfd", "a kernel before 6.3");
  const Fd segment = create_segment(4096);
  CHECK((fcntl(segment.get(), F_GET_SEALS) & kSealExec) != 0);
  CHECK(fchmod(segment.get(), 0700) != 0);
}

TEST(names_tell_neither_key_nor_rank) {
  SipKey key = fresh_key();
  const std::string name = mesh_address(key, 0);
  CHECK_EQ(name.size(), size_t{38});
  CHECK(name != mesh_address(key, 1));
  key[15] ^= 1;
  CHECK(name != mesh_address(key, 0));
}

TEST_MAIN
