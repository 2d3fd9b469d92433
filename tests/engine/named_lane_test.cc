// Operations by name meet whatever the order in which ranks submit them, and do not disturb the ordered ones.
#include <algorithm>
#include <numeric>
#include <random>

#include "base/clock.h"
#include "base/error.h"
#include "rank_threads.h"
#include "support/check.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

Request sum_of(float* x, size_t count, const std::string& name) {
  return {.kind = Kind::kAllReduce, .in = x, .out = x, .count = count, .name = name};
}

void expect_working(Communicator& comm, const std::string& name = "") {
  float x = 1;
  Request request = sum_of(&x, 1, name);
  const auto operation = name.empty() ? comm.submit(request) : comm.submit_by_name(request);
  comm.wait(*operation);
  CHECK_EQ(x, static_cast<float>(comm.size()));
}

Settings on_nodes(std::vector<int> nodes) {
  Settings settings = test_settings();
  settings.nodes = std::move(nodes);
  return settings;
}

// Of 3 ranks: memory that all share, messages alone, and two levels.
std::vector<Settings> all_of_three() { return {test_settings(), without_shared_memory(), on_nodes({0, 1, 1})}; }

// Sizes of every path: inline, slots, staged, and none.
constexpr size_t kCounts[] = {1, 0, 30, 1000, 5000, 100000, 7, 22};
constexpr int kNames = 24;

void steps_in_random_order(Communicator& comm, unsigned seed) {
  std::mt19937 random(test::seed() + seed * 100 + static_cast<unsigned>(comm.rank()));
  const float sum_of_ranks = static_cast<float>(comm.size() * (comm.size() + 1) / 2);
  for (int step = 0; step < 4; ++step) {
    std::vector<int> order(kNames);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    std::vector<std::vector<float>> values(kNames);
    std::vector<std::shared_ptr<Operation>> operations(kNames);
    for (const int i : order) {
      values[i].assign(kCounts[i % std::size(kCounts)], static_cast<float>((i + 1) * (comm.rank() + 1)));
      operations[i] = comm.submit_by_name(sum_of(values[i].data(), values[i].size(), "tensor." + std::to_string(i)));
      if (random() % 6 == 0) std::this_thread::yield();
    }
    expect_working(comm);  // an ordered one beside them
    std::shuffle(order.begin(), order.end(), random);
    for (const int i : order) {
      comm.wait(*operations[i]);
      for (const float value : values[i]) CHECK_EQ(value, static_cast<float>(i + 1) * sum_of_ranks);
    }
  }
}

}  // namespace

TEST(names_meet_in_any_order) {
  const auto meet = [](int n, const Settings& settings) {
    run_ranks(n, settings, [&](Communicator& comm) { steps_in_random_order(comm, static_cast<unsigned>(n)); });
  };
  for (const Settings& settings : {test_settings(), without_shared_memory()}) {
    for (const int n : {1, 2, 3, 4}) meet(n, settings);
  }
  for (const std::vector<int>& nodes : {std::vector<int>{0, 1, 1}, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1, 2}}) {
    meet(static_cast<int>(nodes.size()), on_nodes(nodes));
  }
}

// A rank that does nothing but submit is seen by the others all the same.
TEST(names_need_nobody_who_waits) {
  run_ranks(3, [](Communicator& comm) {
    std::vector<float> x(20000, 1.0f);
    const auto operation = comm.submit_by_name(sum_of(x.data(), x.size(), "x"));
    while (!operation->done) std::this_thread::yield();
    CHECK_EQ(x.back(), 3.0f);
  });
}

// Also those that are submitted while the failure is told.
TEST(names_end_when_the_communicator_fails) {
  for (int trial = 0; trial < 30; ++trial) {
    run_ranks(2, [trial](Communicator& comm) {
      if (comm.rank() == 1) {
        std::this_thread::sleep_for(std::chrono::microseconds(1000 + 50 * trial));
        return comm.fail("the data ran out");
      }
      std::vector<float> x(1 << 15);
      std::vector<std::shared_ptr<Operation>> operations;
      const auto submit = [&] {
        operations.push_back(comm.submit_by_name(sum_of(x.data(), x.size(), std::to_string(operations.size()))));
      };
      const auto submit_for_ever = [&] {
        while (true) submit();
      };
      CHECK_THROWS(submit_for_ever(), PeerError, "the data ran out");
      const auto begin = Clock::now();
      for (const auto& operation : operations) {
        while (!comm.wait_for(*operation, 0.1) && seconds_between(begin, Clock::now()) < 5) {
        }
        CHECK(operation->done);
      }
    });
  }
}

TEST(every_collective_meets_by_name) {
  for (const Settings& settings : all_of_three()) {
    run_ranks(3, settings, [](Communicator& comm) {
      const int rank = comm.rank();
      int32_t x[6] = {rank, rank, rank, rank, rank, rank}, root = rank == 1 ? 7 : 0, share[2];
      std::vector<Request> requests{
          {.kind = Kind::kAllGather, .in = x, .count = 1, .row_elems = 4, .dtype = DType::kInt32, .name = "a"},
          {.kind = Kind::kBroadcast,
           .in = &root,
           .out = &root,
           .count = 4,
           .dtype = DType::kInt32,
           .root = 1,
           .name = "a"},
          {.kind = Kind::kAllToAll,
           .in = x,
           .count = 3,
           .row_elems = 4,
           .dtype = DType::kInt32,
           .name = "a",
           .splits = {1, 1, 1}},
          {.kind = Kind::kReduceScatter, .in = x, .out = share, .count = 6, .dtype = DType::kInt32, .name = "a"},
          {.kind = Kind::kBarrier, .name = "a"}};
      std::vector<std::shared_ptr<Operation>> operations(5);
      for (int i = 0; i < 5; ++i) operations[(i + rank) % 5] = comm.submit_by_name(requests[(i + rank) % 5]);
      for (const auto& operation : operations) comm.wait(*operation);
      for (const int i : {0, 2}) {
        const auto* rows = reinterpret_cast<const int32_t*>(operations[i]->output->data());
        for (int peer = 0; peer < 3; ++peer) CHECK_EQ(rows[peer], peer);
      }
      CHECK_EQ(root, 7);
      CHECK_EQ(share[0], 3);
    });
  }
}

TEST(mismatch_by_name_lists_every_rank_and_the_job_goes_on) {
  for (const Settings& settings : all_of_three()) {
    run_ranks(3, settings, [](Communicator& comm) {
      std::vector<float> x(8, 1.0f), y(8, 1.0f);
      const auto good = comm.submit_by_name(sum_of(y.data(), 8, "good"));
      const auto bad = comm.submit_by_name(sum_of(x.data(), comm.rank() == 1 ? 7 : 8, "w"));
      CHECK_THROWS(comm.wait(*bad), MismatchError,
                   "ranks 0, 2 called allreduce 'w' (sum of 8 float32); rank 1 called allreduce 'w' (sum of 7 "
                   "float32). Nothing was moved");
      comm.wait(*good);
      expect_working(comm, "w");
      expect_working(comm);
    });
  }
}

TEST(a_name_twice_in_flight_is_refused) {
  run_ranks(2, [](Communicator& comm) {
    float x = 1, y = 1;
    if (comm.rank() == 1) {
      const auto first = comm.submit_by_name(sum_of(&x, 1, "grad"));
      CHECK_THROWS(comm.submit_by_name(sum_of(&y, 1, "grad")), ArgumentError,
                   "allreduce 'grad' (sum of 1 float32): an operation of this kind and name is still under way");
      run(comm, {.kind = Kind::kBarrier});
      comm.wait(*first);
    } else {
      run(comm, {.kind = Kind::kBarrier});
      comm.wait(*comm.submit_by_name(sum_of(&x, 1, "grad")));
    }
    CHECK_EQ(x, 2.0f);
    expect_working(comm, "grad");
  });
}

TEST(a_name_that_never_comes_is_a_timeout_that_names_the_ranks) {
  for (const int late : {0, 2}) {
    Settings settings = test_settings();
    settings.timeout_s = 0.3;
    auto world = connect_threads(3, settings);
    std::vector<std::string> texts(3);
    on_threads(3, [&](int rank) {
      float x = 1;
      if (rank == late) return;
      try {
        world[rank]->wait(*world[rank]->submit_by_name(sum_of(&x, 1, "late")));
      } catch (const TimeoutError& e) {
        texts[rank] = e.what();
      }
    });
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == late) continue;
      CHECK(texts[rank].find("allreduce 'late' (sum of 1 float32)") != std::string::npos);
      CHECK(texts[rank].find("waiting for rank " + std::to_string(late) + " of 3") != std::string::npos);
    }
  }
}

TEST(a_failure_ends_names_too) {
  auto world = connect_threads(2, test_settings());
  float x = 1;
  const auto operation = world[0]->submit_by_name(sum_of(&x, 1, "x"));
  world[1]->fail("gone fishing");
  CHECK_THROWS(world[0]->wait(*operation), PeerError, "rank 1: gone fishing");
  CHECK_THROWS(world[0]->submit_by_name(sum_of(&x, 1, "x")), PeerError, "gone fishing");
}

TEST_MAIN
