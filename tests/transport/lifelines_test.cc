// Lines between processes that take each other for ranks of different machines. Every rank is a forked child.
#include "transport/os/lifelines.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <new>
#include <thread>

#include "support/check.h"

using namespace dcoll;
using std::chrono::milliseconds;

namespace {

constexpr int kRanks = 3, kVictim = 1;
constexpr milliseconds kLimit{20'000};

// What ranks tell each other at start-up, in memory of all.
struct Shared {
  LifelineAddress addresses[kRanks];
  std::atomic<int> told, connected, noticed;
  pid_t left_behind;
};

struct SharedMemory {
  void* const at = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  Shared* const shared = new (at) Shared{};
  ~SharedMemory() { munmap(at, sizeof(Shared)); }
};

template <typename Done>
void wait_until(Done done) {
  const auto deadline = std::chrono::steady_clock::now() + kLimit;
  while (!done()) {
    if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("waited in vain");
    std::this_thread::sleep_for(milliseconds(1));
  }
}

// body(rank, lines) on `kRanks` connected processes; their exit statuses.
template <typename Body>
std::vector<int> run(Shared& shared, Body body) {
  std::vector<pid_t> children;
  std::fflush(stdout);
  for (int rank = 0; rank < kRanks; ++rank) {
    children.push_back(fork());
    if (children.back() != 0) continue;
    try {
      Lifelines lines(/*loopback=*/true);
      shared.addresses[rank] = lines.address();
      ++shared.told;
      wait_until([&] { return shared.told == kRanks; });
      const std::vector<LifelineAddress> all(shared.addresses, shared.addresses + kRanks);
      CHECK(lines.connect(all, {0, 1, 2}, rank, kLimit, {}).empty());
      CHECK(lines.ended().empty());
      ++shared.connected;
      wait_until([&] { return shared.connected == kRanks; });
      body(rank, lines);
      ++shared.noticed;
      if (rank != kVictim) wait_until([&] { return shared.noticed >= kRanks - 1; });  // farewells would be heard
    } catch (const std::exception& e) {
      std::fprintf(stderr, "  rank %d: %s\n", rank, e.what());
      _exit(1);
    }
    _exit(0);
  }
  std::vector<int> statuses;
  for (const pid_t child : children) {
    int status = 0;
    CHECK_EQ(waitpid(child, &status, 0), child);
    statuses.push_back(status);
  }
  return statuses;
}

void expect_the_victims_end(Lifelines& lines) {
  std::vector<int> ended;
  wait_until([&] { return !(ended = lines.ended()).empty(); });
  CHECK(ended == std::vector<int>{kVictim});
  CHECK(lines.ended() == ended);  // it stays dead
}

}  // namespace

TEST(a_killed_process_is_noticed) {
  const SharedMemory memory;
  const std::vector<int> statuses = run(*memory.shared, [](int rank, Lifelines& lines) {
    if (rank == kVictim) raise(SIGKILL);
    expect_the_victims_end(lines);
  });
  CHECK_EQ(statuses[0], 0);
  CHECK_EQ(statuses[2], 0);
}

// A data loader's worker has copies of its parent's sockets.
TEST(a_killed_process_is_noticed_though_its_child_lives_on) {
  const SharedMemory memory;
  Shared& shared = *memory.shared;
  const std::vector<int> statuses = run(shared, [&](int rank, Lifelines& lines) {
    if (rank == kVictim) {
      const pid_t child = fork();
      if (child == 0) {
        for (;;) pause();
      }
      shared.left_behind = child;
      raise(SIGKILL);
    }
    expect_the_victims_end(lines);
  });
  CHECK(shared.left_behind > 0);
  kill(shared.left_behind, SIGKILL);
  CHECK_EQ(statuses[0], 0);
  CHECK_EQ(statuses[2], 0);
}

TEST(who_takes_leave_has_not_died_nor_has_a_child_that_ends) {
  const SharedMemory memory;
  std::atomic<int>& noticed = memory.shared->noticed;
  const std::vector<int> statuses = run(*memory.shared, [&](int rank, Lifelines& lines) {
    if (rank == kVictim) {
      const pid_t child = fork();
      if (child == 0) {
        lines.~Lifelines();
        _exit(0);
      }
      CHECK_EQ(waitpid(child, nullptr, 0), child);
      std::this_thread::sleep_for(milliseconds(50));
      CHECK(lines.ended().empty());
      lines.~Lifelines();
      new (&lines) Lifelines(true);
      return;
    }
    wait_until([&] { return noticed > 0; });
    for (int i = 0; i < 50; ++i) {
      CHECK(lines.ended().empty());
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  CHECK(statuses == std::vector<int>(kRanks, 0));
}

// Whoever does not know the token is none of the ranks; who never comes is told of.
TEST(strangers_and_absent_ranks) {
  Lifelines lines(true);
  std::vector<LifelineAddress> all(3, lines.address());
  all[2].count = 0;  // nowhere to reach it
  std::vector<std::thread> strangers;
  for (const char* words : {"GET / HTTP/1.0\r\n\r\n and more", "", "DCFL\0\0\0\0and a wrong token...."}) {
    strangers.emplace_back([port = lines.address().port, words] {
      const Fd socket_fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      sockaddr_in to{};
      to.sin_family = AF_INET;
      to.sin_port = htons(port);
      to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      if (connect(socket_fd.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0) return;
      if (*words != 0) send(socket_fd.get(), words, 28, MSG_NOSIGNAL);
      char word;
      while (recv(socket_fd.get(), &word, 1, 0) > 0) {
      }
    });
  }
  CHECK((lines.connect(all, {0, 0, 1}, 1, milliseconds(200), {}) == std::vector<int>{2}));
  for (std::thread& stranger : strangers) stranger.join();
  CHECK(lines.ended().empty());
}

TEST(who_watches_whom) {
  CHECK(watched_from(0, {0, 0, 0}).empty());
  CHECK((watched_from(1, {0, 0, 1, 2}) == std::vector<int>{2, 3}));
  for (const int per_machine : {1, 3}) {
    std::vector<int> machines;
    for (int rank = 0; rank < 150; ++rank) machines.push_back(rank / per_machine);
    machines.back() = 1000;  // one of a machine of its own
    for (int rank = 0; rank < 150; ++rank) {
      const std::vector<int> watched = watched_from(rank, machines);
      CHECK(watched.size() >= 2);
      CHECK(watched.size() <= 5);
      for (const int other : watched) {
        CHECK(machines[static_cast<size_t>(other)] != machines[static_cast<size_t>(rank)]);
        const std::vector<int> back = watched_from(other, machines);
        CHECK(std::find(back.begin(), back.end(), rank) != back.end());
      }
    }
  }
}

TEST_MAIN
