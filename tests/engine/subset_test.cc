// Communicators of some of the ranks: overlapping ones, beside the whole, made and dropped many times.
#include "engine/communicator/subset.h"

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <numeric>
#include <thread>
#include <vector>

#include "base/error.h"
#include "engine/communicator/world.h"
#include "rank_threads.h"
#include "support/check.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

using CommPtr = std::shared_ptr<Communicator>;

void on_ranks(int n, const std::function<void(const CommPtr&)>& body, const Settings& settings = test_settings()) {
  const std::vector<CommPtr> comms = connect_threads(n, settings);
  on_threads(n, [&](int rank) {
    const CommPtr& comm = comms[rank];
    try {
      body(comm);
    } catch (const std::exception& error) {
      comm->fail(error.what());  // the others must not wait
      throw;
    }
    comm->close();
  });
}

// Null where this rank is not in it: then nothing is called.
CommPtr make_subset(const CommPtr& whole, const std::vector<int>& ranks) {
  const bool member = std::find(ranks.begin(), ranks.end(), whole->rank()) != ranks.end();
  return member ? make_group(whole, ranks, nullptr) : nullptr;
}

// The sum over `comm` of count numbers; rank r of the whole brings r + 1 everywhere.
void check_sum(Communicator& comm, std::byte* memory, size_t count, int rank, const std::vector<int>& ranks) {
  auto* numbers = reinterpret_cast<float*>(memory);
  std::fill_n(numbers, count, static_cast<float>(rank + 1));
  auto operation = comm.submit({.kind = Kind::kAllReduce, .in = numbers, .out = numbers, .count = count});
  comm.wait(*operation);
  const float want = static_cast<float>(std::accumulate(ranks.begin(), ranks.end(), static_cast<int>(ranks.size())));
  for (size_t i = 0; i < count; ++i) CHECK_EQ(numbers[i], want);
}

void close(CommPtr& comm) {
  if (comm != nullptr) comm->close();
  comm = nullptr;
}

}  // namespace

TEST(overlapping_sets_beside_the_whole) {
  const std::vector<std::vector<int>> sets = {{0, 1}, {1, 2, 3}, {0, 1, 2, 3}, {2}};
  on_ranks(4, [&](const CommPtr& whole) {
    const int rank = whole->rank();
    std::vector<CommPtr> made;
    for (const auto& ranks : sets) made.push_back(make_subset(whole, ranks));
    // Memory of the whole, and memory of its own, small and large.
    const auto mapped = whole->alloc(400'000);
    std::vector<std::byte> plain(400'000);
    for (const size_t count : {size_t{1}, size_t{3000}, size_t{100'000}}) {
      for (size_t s = 0; s < sets.size(); ++s) {
        if (made[s] == nullptr) continue;
        CHECK_EQ(made[s]->size(), static_cast<int>(sets[s].size()));
        CHECK_EQ(sets[s][made[s]->rank()], rank);
        check_sum(*made[s], mapped->data(), count, rank, sets[s]);
        check_sum(*made[s], plain.data(), count, rank, sets[s]);
        const auto own = made[s]->alloc(4 * count);
        check_sum(*made[s], own->data(), count, rank, sets[s]);
        if (sets[s].size() == 4) check_sum(*whole, own->data(), count, rank, sets[s]);
      }
    }
    for (CommPtr& comm : made) close(comm);
    check_sum(*whole, plain.data(), 10, rank, {0, 1, 2, 3});
  });
}

TEST(regions_are_used_again) {
  on_ranks(3, [](const CommPtr& whole) {
    std::vector<const BoardEntry*> places;
    for (int round = 0; round < 500; ++round) {
      const std::vector<int> ranks = round % 2 ? std::vector<int>{0, 2} : std::vector<int>{0, 1, 2};
      CommPtr comm = make_subset(whole, ranks);
      if (comm == nullptr) continue;
      places.push_back(&comm->members().window->board(comm->rank()));
      std::vector<std::byte> plain(400);
      check_sum(*comm, plain.data(), 100, whole->rank(), ranks);
      close(comm);
    }
    // Two places for each size, as a member that is still leaving keeps one: groups of two and of three ranks.
    std::sort(places.begin(), places.end());
    CHECK(std::unique(places.begin(), places.end()) - places.begin() <= 4);
  });
}

// Nobody waits for the others, whatever the order, and they have all the time they want. What they still call says so.
TEST(members_leave_one_by_one) {
  Settings settings = test_settings();
  settings.timeout_s = 1;
  const auto body = [](const CommPtr& whole) {
    const int rank = whole->rank();
    std::vector<CommPtr> made{make_subset(whole, {0, 1, 2}), make_subset(whole, {0, 1, 2})};
    for (const int i : {0, 1}) made[(i + rank) % 2]->leave();
    if (rank < 2) made.push_back(make_subset(whole, {0, 1}));
    if (rank == 0) made.back()->leave();
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // longer than a wait may be
    std::vector<std::byte> plain(400);
    if (rank == 1) {
      CHECK_THROWS(check_sum(*made.back(), plain.data(), 100, rank, {0, 1}), MismatchError,
                   "rank 0 called shutdown (or the program there ended)");
      made.back()->leave();
    }
    check_sum(*whole, plain.data(), 100, rank, {0, 1, 2});
    const auto deadline = Clock::now() + std::chrono::seconds(20);
    for (const CommPtr& comm : made) {
      while (!comm->left() && Clock::now() < deadline) std::this_thread::yield();
      CHECK(comm->left());
      comm->close();
      CHECK_EQ(comm->failure(), std::string());
    }
  };
  on_ranks(3, body, settings);
}

TEST(a_failure_stays_in_its_set) {
  on_ranks(3, [](const CommPtr& whole) {
    const std::vector<int> ranks = {0, 2};
    CommPtr comm = make_subset(whole, ranks);
    if (whole->rank() == 0) comm->fail("rank 0 gave up");
    if (whole->rank() == 2) {
      std::vector<std::byte> plain(40);
      CHECK_THROWS(check_sum(*comm, plain.data(), 10, 2, ranks), PeerError, "rank 0 gave up");
    }
    std::vector<std::byte> plain(40);
    check_sum(*whole, plain.data(), 10, whole->rank(), {0, 1, 2});
    close(comm);
  });
}

TEST(a_group_of_a_group) {
  on_ranks(4, [](const CommPtr& whole) {
    CommPtr outer = make_subset(whole, {1, 2, 3});
    if (outer == nullptr) return;
    CommPtr inner = outer->rank() != 1 ? make_group(outer, {0, 2}, nullptr) : nullptr;
    std::vector<std::byte> plain(4000);
    if (inner != nullptr) {
      CHECK(inner->members().job_ranks == (std::vector<int>{1, 3}));
      check_sum(*inner, plain.data(), 1000, whole->rank(), {1, 3});
    }
    check_sum(*outer, plain.data(), 1000, whole->rank(), {1, 2, 3});
    close(inner);
    close(outer);
  });
}

TEST(members_that_name_different_ranks_hear_of_it) {
  on_ranks(3, [](const CommPtr& whole) {
    const std::vector<int> ranks = whole->rank() == 2 ? std::vector<int>{0, 2} : std::vector<int>{0, 1, 2};
    CHECK_THROWS(make_group(whole, ranks, nullptr), MismatchError,
                 "rank 2 makes a group of ranks 0, 2 where rank 0 makes one of ranks 0, 1, 2");
    std::vector<std::byte> plain(40);
    CommPtr comm = make_subset(whole, {0, 1, 2});
    check_sum(*comm, plain.data(), 10, whole->rank(), {0, 1, 2});
    close(comm);
  });
}

TEST(a_member_that_never_comes_is_named) {
  Settings settings = test_settings();
  settings.timeout_s = 1;
  const std::vector<CommPtr> comms = connect_threads(4, settings);
  on_threads(4, [&](int rank) {
    if (rank < 3) CHECK_THROWS(make_group(comms[rank], {0, 1, 2, 3}, nullptr), TimeoutError, "waiting for rank 3 of 4");
  });
}

// Each member begins the groups' collectives in another order, so none ends on the thread that began it alone.
TEST(several_groups_at_once) {
  on_ranks(4, [](const CommPtr& whole) {
    const std::vector<std::vector<int>> sets = {{0, 1}, {1, 2, 3}, {0, 1, 2, 3}, {0, 3}, {0, 1, 3}, {2, 3}};
    std::vector<CommPtr> made;
    for (const auto& ranks : sets) made.push_back(make_subset(whole, ranks));
    constexpr size_t kCount = 100'000;
    std::vector<std::vector<float>> data(sets.size(), std::vector<float>(kCount));
    for (size_t round = 0; round < 5; ++round) {
      std::vector<std::shared_ptr<Operation>> operations(sets.size());
      for (size_t i = 0; i < sets.size(); ++i) {
        const size_t s = (i + static_cast<size_t>(whole->rank()) + round) % sets.size();
        if (made[s] == nullptr) continue;
        std::fill(data[s].begin(), data[s].end(), static_cast<float>(whole->rank() + 1));
        void* memory = data[s].data();
        operations[s] = made[s]->submit({.kind = Kind::kAllReduce, .in = memory, .out = memory, .count = kCount});
      }
      for (size_t s = 0; s < sets.size(); ++s) {
        if (made[s] == nullptr) continue;
        const auto& ranks = sets[s];
        made[s]->wait(*operations[s]);
        const int want = std::accumulate(ranks.begin(), ranks.end(), static_cast<int>(ranks.size()));
        for (const float got : data[s]) CHECK_EQ(got, static_cast<float>(want));
      }
    }
    for (CommPtr& comm : made) close(comm);
  });
}

// However many groups a rank is in, one thread brings on what nobody waits for.
TEST(groups_share_a_background_thread) {
  constexpr int kRanks = 3, kGroups = 12;
  const auto num_threads = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/task"), std::filesystem::directory_iterator{});
  };
  std::atomic<int> all_done{0};
  std::atomic<std::ptrdiff_t> most{0};
  const std::ptrdiff_t before = num_threads();
  on_ranks(kRanks, [&](const CommPtr& whole) {
    std::vector<CommPtr> groups;
    for (int i = 0; i < kGroups; ++i) groups.push_back(make_group(whole, {0, 1, 2}, nullptr));
    for (size_t count : {size_t{10}, size_t{100'000}}) {
      std::vector<std::vector<float>> data(kGroups, std::vector<float>(count, static_cast<float>(whole->rank())));
      std::vector<std::shared_ptr<Operation>> operations(kGroups);
      for (size_t i = 0; i < kGroups; ++i) {  // begun in another order on each rank
        const size_t g = (i + 5 * static_cast<size_t>(whole->rank())) % kGroups;
        void* memory = data[g].data();
        operations[g] = groups[g]->submit({.kind = Kind::kAllReduce, .in = memory, .out = memory, .count = count});
      }
      for (size_t g = 0; g < kGroups; ++g) {
        while (!operations[g]->done.load()) std::this_thread::yield();  // no wait()
        for (const float got : data[g]) CHECK_EQ(got, 3.0f);
      }
    }
    most.store(num_threads());
    all_done.fetch_add(1);
    while (all_done.load() < kRanks) std::this_thread::yield();
    for (CommPtr& comm : groups) close(comm);
  });
  CHECK(most.load() - before <= 3 * kRanks);  // of each rank: the test's, the driver's, the stall report's
}

TEST(wrong_ranks_are_refused) {
  on_ranks(2, [](const CommPtr& whole) {
    const int rank = whole->rank();
    for (const std::vector<int>& ranks : {std::vector<int>{}, {1 - rank}, {-1, rank}, {0, 0, 1}, {0, 1, 2}}) {
      CHECK_THROWS(Subset(whole, ranks), ArgumentError, "must be different ranks below 2");
    }
    Subset both(whole, {0, 1});
    const std::vector<uint64_t> one = {0}, outside = {kUnmappedOffset, kUnmappedOffset};
    CHECK_THROWS(both.connect(one, nullptr), ArgumentError, "got 1 offsets");
    CHECK_THROWS(both.connect(outside, nullptr), TransportError, "outside the arena");
  });
}

// A member that has left is not waited for until the deadline, and all others hear so, whoever waits for it.
TEST(a_member_that_has_left) {
  for (const int gone : {0, 1}) {
    on_ranks(3, [&](const CommPtr& whole) {
      if (whole->rank() == gone) return;
      CHECK_THROWS(make_group(whole, {0, 1, 2}, nullptr), MismatchError,
                   "rank " + std::to_string(gone) + " called shutdown");
      const std::vector<int> rest = {gone == 0 ? 1 : 0, 2};
      CommPtr made = make_group(whole, rest, nullptr);
      std::vector<std::byte> memory(64);
      check_sum(*made, memory.data(), 4, whole->rank(), rest);
      close(made);
    });
  }
}

TEST_MAIN
