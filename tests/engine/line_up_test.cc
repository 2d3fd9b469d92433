// A rank that skipped calls the others made, or refused them, gets back into step: the verdicts alone, then whole jobs
// on every path, with random skips.
#include "engine/collective/line_up.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "rank_threads.h"
#include "support/check.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

Standing standing(uint64_t call, std::vector<uint64_t> failed = {}, uint32_t refused = 0) {
  Standing made{.call = call, .refused = refused, .num_failed = static_cast<uint32_t>(failed.size())};
  std::ranges::copy(failed, made.failed.begin());
  return made;
}

std::string verdicts(const std::vector<Standing>& ranks) {
  std::string text;
  for (const Verdict verdict : line_up(ranks)) {
    switch (verdict) {
      case Verdict::kFails:
        text += 'f';
        break;
      case Verdict::kTryAgain:
        text += 'a';
        break;
      case Verdict::kGivesWay:
        text += 'g';
        break;
    }
  }
  return text;
}

// What a rank of a job calls: the sizes of its all-reduces, each its own.
struct Script {
  Communicator& comm;
  std::string seen{};  // of each call: '.' right, 'x' MismatchError

  void call(size_t count, bool now = false) {
    std::vector<float> x(count, static_cast<float>(comm.rank() + 1));
    try {
      if (now) {
        const auto operation = comm.run_or_submit(Call{.in = x.data(), .out = x.data(), .count = count});
        if (operation != nullptr) comm.wait(*operation);
      } else {
        comm.wait(*comm.submit({.kind = Kind::kAllReduce, .in = x.data(), .out = x.data(), .count = count}));
      }
      const auto n = static_cast<float>(comm.size());
      for (const float v : x) CHECK_EQ(v, n * (n + 1) / 2);
      seen += '.';
    } catch (const MismatchError&) {
      seen += 'x';
    }
  }
  void call_now(size_t count) { call(count, true); }
};

Settings two_levels() {
  Settings settings = test_settings();
  settings.nodes = {0, 0, 1};
  return settings;
}

std::vector<Settings> worlds() { return {test_settings(), without_shared_memory(), two_levels()}; }

}  // namespace

TEST(verdicts_where_nothing_is_known) {
  CHECK(verdicts({standing(1), standing(2)}) == "ff");
  CHECK(verdicts({standing(1, {7}), standing(2, {8}), standing(2, {8})}) == "fff");
}

TEST(verdicts_by_what_was_called_in_vain) {
  CHECK(verdicts({standing(2, {1}), standing(3, {2})}) == "fa");  // 1 is ahead of 0
  CHECK(verdicts({standing(3, {2}), standing(2, {1}), standing(2, {1})}) == "aff");
  CHECK(verdicts({standing(3, {2}), standing(4, {3}), standing(2, {1})}) == "faf");
  CHECK(verdicts({standing(2, {1}), standing(1, {2})}) == "af");  // a pattern of two, shifted
}

TEST(verdicts_by_what_was_refused) {
  CHECK(verdicts({standing(1), standing(2, {}, 1), standing(1)}) == "faf");
  CHECK(verdicts({standing(1, {}, 1), standing(2, {}, 1)}) == "ff");  // both refused one
  CHECK(verdicts({standing(1), standing(2, {}, 1), standing(3, {}, 2)}) == "faa");
}

TEST(verdicts_about_ranks_that_give_way_or_have_joined) {
  Standing gives_way = standing(5), joined = standing(6);
  gives_way.gives_way = joined.joined = true;
  CHECK(verdicts({gives_way, standing(1), standing(2, {1})}) == "gff");
  CHECK(verdicts({joined, standing(2, {1}), standing(3, {2})}) == "afa");
}

TEST(more_was_called_in_vain_than_is_kept) {
  OutOfStep memory;
  for (uint64_t number = 1; number <= 3 * Standing::kMostFailed; ++number) {
    const std::vector<Standing> ranks{memory.standing(number, number), standing(1000)};
    CHECK(memory.settle(number, ranks, line_up(ranks), 0));
  }
  const uint64_t last = 3 * Standing::kMostFailed;
  const Standing now = memory.standing(last + 1, 0);
  CHECK(now.had_called(last) && now.had_called(last - Standing::kMostFailed + 1));
  CHECK(!now.had_called(last - Standing::kMostFailed));
  CHECK_EQ(memory.standing(last + 3, 0).num_failed, 0u);  // operation last + 1 succeeded
}

TEST(a_skipped_call_is_made_up_for) {
  for (const Settings& settings : worlds()) {
    for (int skips = 1; skips <= 3; ++skips) {
      run_ranks(3, settings, [&](Communicator& comm) {
        Script script{comm};
        for (int i = 1; i <= 8; ++i) {
          if (comm.rank() == 1 && i >= 2 && i < 2 + skips) continue;
          script.call(static_cast<size_t>(100 * i));
        }
        // `skips` calls fail everywhere, and as many more where they were not skipped.
        const std::string failed(static_cast<size_t>(skips), 'x');
        const std::string rest(static_cast<size_t>(7 - 2 * skips), '.');
        CHECK(script.seen == "." + failed + (comm.rank() == 1 ? "" : failed) + rest);
      });
    }
  }
}

// The calls of a training loop come again and again, so each was called before by everybody. Whether a rank is ahead or
// behind nothing tells then: what it lost may be the rest of a turn, which the others end without it.
TEST(a_skipped_call_of_a_repeated_pattern) {
  for (const Settings& settings : worlds()) {
    run_ranks(3, settings, [&](Communicator& comm) {
      Script script{comm};
      for (int step = 0; step < 10; ++step) {
        for (const size_t count : {10u, 5000u}) {
          if (comm.rank() == 2 && step == 3 && count == 10) continue;
          script.call(count, step % 2 != 0);
        }
      }
      CHECK(script.seen.substr(0, 6) == "......" && script.seen.substr(9, 8) == "........");
    });
  }
}

TEST(a_refused_call_fails_where_it_was_made_and_nowhere_else) {
  for (const Settings& settings : worlds()) {
    run_ranks(3, settings, [&](Communicator& comm) {
      Script script{comm};
      script.call_now(4);
      std::vector<float> x(64, 1.0f);
      if (comm.rank() == 1) {
        comm.note_refused("ValueError: no tensor");
      } else {
        CHECK_THROWS(
            run(comm, {.kind = Kind::kAllReduce, .in = x.data(), .out = x.data(), .count = 64}), MismatchError,
            "rank 1 called allreduce (sum of 7 float32) after a call there was refused (ValueError: no tensor)");
      }
      for (const size_t count : {7u, 30000u, 1u}) script.call_now(count);
      if (comm.rank() == 0) comm.note_refused("a call that nobody makes");
      script.call_now(9);
      script.call(9);
      CHECK(script.seen == "......");
    });
  }
}

TEST(a_rank_that_gives_way_fails_the_others_call_at_once) {
  for (const Settings& settings : worlds()) {
    run_ranks(3, settings, [&](Communicator& comm) {
      Script script{comm};
      script.call_now(4);
      for (int round = 0; round < 3; ++round) {
        std::vector<float> x(64, 1.0f);
        if (comm.rank() == round) {
          comm.refuse("out of memory");
        } else {
          CHECK_THROWS(run(comm, {.kind = Kind::kAllReduce, .in = x.data(), .out = x.data(), .count = 64}),
                       MismatchError, "could not make its call: out of memory");
        }
        script.call_now(4);
      }
      comm.refuse("everybody");
      script.call(100);
      CHECK(script.seen == ".....");
    });
  }
}

// Whatever each rank skips or refuses: once all make the same calls again, they soon agree again.
TEST(random_skips) {
  std::mt19937_64 random(seed());
  for (int trial = 0; trial < (kSanitized ? 9 : 60); ++trial) {
    const int size = 2 + static_cast<int>(random() % 3);
    const uint64_t seed = random();
    run_ranks(size, worlds()[static_cast<size_t>(trial) % 3], [&](Communicator& comm) {
      std::mt19937_64 mine(seed + static_cast<uint64_t>(comm.rank()));
      Script script{comm};
      for (size_t i = 0; i < 40; ++i) {
        if (i < 12 && mine() % 4 == 0) {
          if (mine() % 2) comm.note_refused("refused");
          if (mine() % 4 == 0) comm.note_refused("of a call that nobody makes");
          continue;
        }
        script.call(1 + 37 * i, mine() % 2 != 0);
      }
      CHECK(script.seen.ends_with("....."));
    });
  }
}

TEST_MAIN
