// The board's barrier, flat and by the arrival tree, with ranks as threads; and whose core is whose.
#include "engine/board/agreement.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>

#include "base/error.h"
#include "engine/communicator/cores.h"
#include "rank_threads.h"
#include "support/check.h"
#include "transport/mapped/local.h"
#include "transport/mapped/mapped.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

MappedOptions options(int flat_ranks) {
  return {.arena_bytes = 1 << 16, .slot_bytes = 64, .slots = 1, .flat_ranks = flat_ranks};
}

// Looks a few times, yielding, then sleeps until a peer acts: as a rank without a core of its own waits.
void wait_for(Transport& transport, Pollable& pollable, int looks) {
  const auto hang = std::chrono::seconds(60);
  for (;;) {
    const uint32_t ticket = transport.prepare_wait();
    bool moved = false;
    if (pollable.poll(moved)) return;
    if (looks-- > 0) {
      std::this_thread::yield();
      continue;
    }
    const auto before = std::chrono::steady_clock::now();
    transport.wait(ticket, hang);
    CHECK(std::chrono::steady_clock::now() - before < hang);  // a lost wake-up
  }
}

// `rounds` posts over n ranks: each carries plain data that only the board orders. In round k the ranks agree, unless
// k % 3 == 2: then rank `k % n` shows another fingerprint; and all operands are mapped, unless k % 4 == 3.
void post_and_check(int n, int flat_ranks, uint64_t rounds, int looks) {
  auto ends = connect_local(n, options(flat_ranks));
  std::vector<uint64_t> data(static_cast<size_t>(n) * 16);
  on_threads(n, [&](int rank) {
    Endpoint& end = ends[static_cast<size_t>(rank)];
    Board board(*end.window);
    CHECK_EQ(board.has_tree(), n > flat_ranks);
    for (uint64_t k = 1; k <= rounds; ++k) {
      const auto odd = static_cast<int>(k % static_cast<uint64_t>(n));
      const bool differs = k % 3 == 2 && n > 1, unmapped = k % 4 == 3;
      data[static_cast<size_t>(rank) * 16 + k % 2] = k * 1000 + static_cast<uint64_t>(rank);
      const uint64_t ticket = board.post({.fingerprint = 7 * k + (differs && rank == odd ? 1 : 0),
                                          .offset_in = unmapped && rank == odd ? Window::kUnmapped : k,
                                          .value = static_cast<uint64_t>(rank)});
      CHECK_EQ(ticket, k);
      BoardWait everybody(board, ticket);
      wait_for(*end.transport, everybody, looks);
      CHECK(board.complete(ticket));
      CHECK_EQ(board.fingerprints_equal(ticket), !differs);
      CHECK_EQ(board.count_mapped(ticket), unmapped ? n - 1 : n);
      for (int peer = 0; peer < n; ++peer) {
        CHECK(board.seen(peer, ticket));
        CHECK_EQ(board.at(peer, ticket).value, static_cast<uint64_t>(peer));
        CHECK_EQ(data[static_cast<size_t>(peer) * 16 + k % 2], k * 1000 + static_cast<uint64_t>(peer));
      }
    }
  });
}

CoreClaim on_cores(const std::set<int>& cores, uint64_t quota_id = 0, double quota = 0) {
  CoreClaim claim;
  CPU_ZERO(&claim.cores);
  for (const int core : cores) CPU_SET(static_cast<size_t>(core), &claim.cores);
  claim.quota_id = quota_id;
  claim.quota_cores = quota;
  return claim;
}

std::string letters(const std::vector<bool>& own) {
  std::string text;
  for (const bool one : own) text += one ? 'o' : 's';  // own, shared
  return text;
}

}  // namespace

TEST(every_number_of_ranks_flat_and_by_tree) {
  for (int n = 1; n <= 16; ++n) {
    for (const int flat_ranks : {1, 64}) {
      if (n > 1 || flat_ranks > 1) post_and_check(n, flat_ranks, 24, n % 2 ? 0 : 3);
    }
  }
}

TEST(many_ranks) {
  for (const int n : {33, 64, 128}) post_and_check(n, 8, 8, n == 64 ? 0 : 3);
}

TEST(no_wake_up_is_lost) {
  post_and_check(4, 64, 1500, 0);
  post_and_check(4, 1, 1500, 0);
  post_and_check(9, 8, 300, 1);
}

TEST(a_wait_names_whoever_has_not_posted) {
  constexpr int n = 11;
  for (const int flat_ranks : {4, 16}) {
    auto ends = connect_local(n, options(flat_ranks));
    std::vector<std::unique_ptr<Board>> boards;
    for (auto& end : ends) boards.push_back(std::make_unique<Board>(*end.window));
    for (const int rank : {0, 1, 2, 3, 5, 6, 8, 9, 10}) boards[static_cast<size_t>(rank)]->post({.fingerprint = 1});
    BoardWait everybody(*boards[0], 1);
    bool moved = false;
    CHECK(!everybody.poll(moved));
    std::vector<int> missing;
    everybody.waiting_for(missing);
    CHECK(missing == std::vector<int>({4, 7}));
    boards[4]->post({.fingerprint = 1});
    CHECK(!everybody.poll(moved));
    boards[7]->post({.fingerprint = 1});
    moved = false;
    CHECK(everybody.poll(moved));
    CHECK(moved);
  }
}

// A rank may post once more before it looks at what it posted before (post t+2 is what needs t).
TEST(the_tree_allows_one_post_ahead) {
  constexpr int n = 10;
  auto ends = connect_local(n, options(2));
  std::vector<std::unique_ptr<Board>> boards;
  for (auto& end : ends) boards.push_back(std::make_unique<Board>(*end.window));
  for (uint64_t t = 1; t <= 9; t += 2) {
    for (size_t rank = 1; rank < n; ++rank) {
      boards[rank]->post({.fingerprint = t});
      boards[rank]->post({.fingerprint = rank == 3 ? t : t + 1});
    }
    for (auto& board : boards) CHECK(!board->complete(t));
    boards[0]->post({.fingerprint = t});
    for (auto& board : boards) CHECK(board->complete(t) && !board->complete(t + 1) && board->fingerprints_equal(t));
    boards[0]->post({.fingerprint = t + 1});
    for (auto& board : boards) CHECK(board->complete(t + 1) && !board->fingerprints_equal(t + 1));
  }
}

TEST(groups_stay_within_a_numa_node) {
  CHECK(arrival_groups(std::vector<int>(8, -1), 8).empty());
  using Groups = std::vector<std::vector<int>>;
  CHECK(arrival_groups(std::vector<int>(5, -1), 4) == Groups({{0, 1, 2}, {3, 4}}));
  CHECK(arrival_groups({1, 0, 1, 0, 1, 0}, 4) == Groups({{1, 3, 5}, {0, 2, 4}}));
  CHECK(arrival_groups({0, 0, 0, 0, 0, 1}, 4) == Groups({{0, 1, 2}, {3, 4}, {5}}));
  const Groups groups = arrival_groups(std::vector<int>(128, 0), 8);
  CHECK_EQ(groups.size(), size_t{11});
  for (const auto& group : groups) CHECK(group.size() <= 12);
}

TEST(ranks_of_several_nodes_agree) {
  constexpr int n = 12;
  std::vector<int> nodes;
  for (int rank = 0; rank < n; ++rank) nodes.push_back(rank % 2);
  auto ends = connect_local(n, options(8), nodes);
  on_threads(n, [&](int rank) {
    Endpoint& end = ends[static_cast<size_t>(rank)];
    Board board(*end.window);
    for (uint64_t k = 1; k <= 50; ++k) {
      BoardWait everybody(board, board.post({.fingerprint = k}));
      wait_for(*end.transport, everybody, 2);
      CHECK(board.fingerprints_equal(k));
    }
  });
}

TEST(a_core_is_own_when_nobody_else_needs_it) {
  const CoreClaim zero = on_cores({0}), one = on_cores({1}), both = on_cores({0, 1});
  CHECK_EQ(letters(own_core(std::vector{zero, one})), std::string("oo"));
  CHECK_EQ(letters(own_core(std::vector{both, both})), std::string("oo"));
  CHECK_EQ(letters(own_core(std::vector{zero, both})), std::string("oo"));
  CHECK_EQ(letters(own_core(std::vector{zero, zero})), std::string("ss"));
  CHECK_EQ(letters(own_core(std::vector{both, both, both, both})), std::string("ssss"));
  // Two ranks on one core of many: only they share.
  CHECK_EQ(letters(own_core(std::vector{zero, one, zero, on_cores({2, 3})})), std::string("soso"));
  // Three ranks on cores 0 and 1, and one that could be pushed off core 1, but has core 2.
  CHECK_EQ(letters(own_core(std::vector{both, both, on_cores({1, 2}), both})), std::string("ssos"));
  CHECK_EQ(letters(own_core(std::vector{on_cores({0, 1, 2}), zero, one, on_cores({1, 2})})), std::string("ssss"));
}

TEST(a_core_that_is_taken_again_and_again_is_nobodys_own) {
  using std::chrono::milliseconds;
  const Clock::time_point begin = Clock::now();
  Interruptions thread;
  CHECK(!thread.look(1000, begin));                      // nothing to compare with
  CHECK(!thread.look(2000, begin + milliseconds(49)));   // too early
  CHECK(!thread.look(1003, begin + milliseconds(100)));  // as often as 30 times a second
  CHECK(thread.look(1007, begin + milliseconds(200)));
  CHECK(thread.look(1007, begin + milliseconds(249)));  // holds for a while
  CHECK(!thread.look(1007, begin + milliseconds(251)));
}

TEST(a_cpu_quota_counts_as_cores) {
  const std::set<int> many{0, 1, 2, 3};
  const CoreClaim tight = on_cores(many, 5, 1.5), wide = on_cores(many, 6, 2);
  CHECK_EQ(letters(own_core(std::vector{tight, tight, wide, wide})), std::string("ssoo"));
  CHECK_EQ(letters(own_core(std::vector{tight, wide})), std::string("oo"));
}

TEST(the_tightest_quota_of_a_control_group_is_found) {
  char root[] = "/tmp/dcoll-quota-XXXXXX";
  CHECK(mkdtemp(root) != nullptr);
  std::filesystem::create_directories(std::string(root) + "/a/b");
  auto limit = [&](const char* group, const char* text) {
    std::ofstream(std::string(root) + group + "/cpu.max") << text;
  };
  CoreClaim none;
  read_cpu_quota(root, "/a/b", none);
  CHECK_EQ(none.quota_id, uint64_t{0});
  limit("/a/b", "max 100000");
  limit("/a", "150000 100000");
  limit("", "400000 100000");
  CoreClaim claim;
  read_cpu_quota(root, "/a/b", claim);
  struct stat info{};
  CHECK(stat((std::string(root) + "/a").c_str(), &info) == 0);
  CHECK_EQ(claim.quota_cores, 1.5);
  CHECK_EQ(claim.quota_id, static_cast<uint64_t>(info.st_ino));
  CoreClaim outside;
  read_cpu_quota(root, "/", outside);
  CHECK_EQ(outside.quota_cores, 4.0);
  std::filesystem::remove_all(root);
}

// Whole communicators through the tree: results, mismatches at any rank, deadlines, a peer's failure while others
// sleep.
TEST(collectives_of_many_ranks) {
  for (const int n : {9, 12, 33}) {
    run_ranks(n, [n](Communicator& comm) {
      std::vector<float> x(5);
      for (int round = 0; round < 4; ++round) {
        x.assign(5, static_cast<float>(comm.rank()));
        run(comm, {.kind = Kind::kAllReduce, .in = x.data(), .out = x.data(), .count = 5});
        for (const float v : x) CHECK_EQ(v, static_cast<float>(n * (n - 1) / 2));
        run(comm, {.kind = Kind::kBarrier});
      }
    });
  }
}

TEST(mismatch_at_any_rank_is_found_through_the_tree) {
  constexpr int n = 10;
  run_ranks(n, [](Communicator& comm) {
    float x[2] = {1, 1};
    for (int odd = 0; odd < n; ++odd) {
      const size_t count = comm.rank() == odd ? 2 : 1;
      CHECK_THROWS(run(comm, {.kind = Kind::kAllReduce, .in = x, .out = x, .count = count}), MismatchError,
                   "rank " + std::to_string(odd) + " called allreduce (sum of 2 float32)");
      float y = 1;
      run(comm, {.kind = Kind::kAllReduce, .in = &y, .out = &y, .count = 1});
      CHECK_EQ(y, static_cast<float>(n));
    }
  });
}

TEST(deadline_names_the_missing_ranks_through_the_tree) {
  constexpr int n = 11;
  Settings settings = test_settings();
  settings.timeout_s = 0.5;
  auto world = connect_threads(n, settings);
  std::vector<std::string> texts(n);
  on_threads(n, [&](int rank) {
    if (rank == 4 || rank == 9) return;
    float x = 1;
    try {
      run(*world[static_cast<size_t>(rank)], {.kind = Kind::kAllReduce, .in = &x, .out = &x, .count = 1});
    } catch (const TimeoutError& e) {
      texts[static_cast<size_t>(rank)] = e.what();
    }
  });
  for (int rank = 0; rank < n; ++rank) {
    if (rank == 4 || rank == 9) continue;
    CHECK(texts[static_cast<size_t>(rank)].find("waiting for ranks 4, 9 of 11") != std::string::npos);
  }
}

// Ranks that trickle in are movement, through the tree as well: no deadline passes while the missing ranks get fewer.
TEST(late_ranks_one_after_the_other_are_movement) {
  constexpr int kFew = 6, kMany = 10;  // two jobs at once, which mostly sleep
  Settings settings = test_settings();
  settings.timeout_s = 3.0;
  const auto few = connect_threads(kFew, settings), many = connect_threads(kMany, settings);
  on_threads(kFew + kMany, [&](int thread) {
    const int n = thread < kFew ? kFew : kMany, rank = thread < kFew ? thread : thread - kFew;
    // The last three come one after the other, the last of them after the deadline of those that came first.
    std::this_thread::sleep_for(std::chrono::milliseconds(1200) * std::max(0, rank - (n - 4)));
    float x = 1;
    const Request sum{.kind = Kind::kAllReduce, .in = &x, .out = &x, .count = 1};
    run(*(n == kFew ? few : many)[static_cast<size_t>(rank)], sum);
    CHECK_EQ(x, static_cast<float>(n));
  });
}

TEST(a_failure_wakes_ranks_that_sleep) {
  for (const int n : {4, 10}) {
    auto world = connect_threads(n, test_settings());
    on_threads(n, [&](int rank) {
      Communicator& comm = *world[static_cast<size_t>(rank)];
      float x = 1;
      if (rank == n - 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        comm.fail("out of luck");
        return;
      }
      CHECK_THROWS(run(comm, {.kind = Kind::kAllReduce, .in = &x, .out = &x, .count = 1}), PeerError, "out of luck");
    });
  }
}

namespace {

// All ranks show `fingerprint(rank)` and let `bytes(rank)` ride along; `see` looks at what came of it.
void disseminate(int n, size_t slot_bytes, const std::function<uint64_t(int)>& fingerprint,
                 const std::function<size_t(int)>& bytes, const std::function<void(int, const Dissemination&)>& see) {
  auto ends = connect_local(n, {.arena_bytes = 1 << 16, .slot_bytes = slot_bytes, .slots = 2});
  on_threads(n, [&](int rank) {
    Transport& transport = *ends[static_cast<size_t>(rank)].transport;
    for (int run = 0; run < 3; ++run) {
      const std::vector<std::byte> operand(bytes(rank), static_cast<std::byte>(rank + 1));
      Dissemination everybody(transport, fingerprint(rank), operand);
      wait_for(transport, everybody, 3);
      see(rank, everybody);
    }
  });
}

}  // namespace

TEST(operands_ride_on_the_handshake) {
  for (int n = 1; n <= 9; ++n) {
    for (const size_t bytes : {size_t{0}, size_t{1}, size_t{24}}) {
      disseminate(
          n, 512, [](int) { return uint64_t{7}; }, [&](int) { return bytes; },
          [&](int, const Dissemination& everybody) {
            CHECK(everybody.equal());
            for (int peer = 0; peer < n; ++peer) {
              for (size_t i = 0; i < bytes; ++i) {
                CHECK_EQ(static_cast<int>(everybody.operand(peer)[i]), peer + 1);
              }
            }
          });
    }
  }
}

TEST(a_mismatch_is_seen_by_all_whatever_rides) {
  for (int n = 2; n <= 9; ++n) {
    for (int odd = 0; odd < n; odd += 2) {
      disseminate(
          n, 512, [&](int rank) { return uint64_t{7} + (rank == odd ? 1 : 0); },
          [&](int rank) { return rank == odd ? size_t{0} : size_t{24}; },
          [](int, const Dissemination& everybody) { CHECK(!everybody.equal()); });
    }
  }
}

TEST(what_may_ride) {
  constexpr size_t kKiB = 1024;
  CHECK(!plan::rides_on_agreement(0, 4, 64 * kKiB));
  CHECK(plan::rides_on_agreement(16 * kKiB, 4, 64 * kKiB));
  CHECK(!plan::rides_on_agreement(16 * kKiB + 1, 4, 64 * kKiB));
  CHECK(!plan::rides_on_agreement(512, 4, kKiB));  // two of them and the fingerprints are too long for a message
  CHECK(plan::rides_on_agreement(504, 4, kKiB));
}

TEST_MAIN
