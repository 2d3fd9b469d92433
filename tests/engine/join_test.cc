// A rank that joined takes part in the others' all-reduces without changing them, in order and by name.
#include <cmath>
#include <limits>
#include <mutex>

#include "base/error.h"
#include "rank_threads.h"
#include "support/check.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

int join(Communicator& comm) {
  const auto operation = comm.submit_join("others go on");
  comm.wait(*operation);
  return static_cast<int>(operation->counts.at(0));
}

template <typename T>
void reduce(Communicator& comm, std::vector<T>& x, DType dtype, ReduceOp op, bool by_name) {
  Request request{.kind = Kind::kAllReduce,
                  .in = x.data(),
                  .out = x.data(),
                  .count = x.size(),
                  .dtype = dtype,
                  .op = op,
                  .name = by_name ? "x" : ""};
  comm.wait(*(by_name ? comm.submit_by_name(request) : comm.submit(request)));
}

const auto kWorlds = {test_settings(), without_shared_memory()};

// Rank r has r + 1 steps, of sizes on every path.
void uneven_steps(Communicator& comm, bool by_name) {
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (int step = 0; step <= comm.rank(); ++step) {
      for (const size_t count : {size_t{1}, size_t{3000}, size_t{50000}}) {
        std::vector<float> x(count, 2.0f);
        reduce(comm, x, DType::kFloat32, ReduceOp::kSum, by_name);
        for (const float v : x) CHECK_EQ(v, 2.0f * static_cast<float>(comm.size() - step));
        x.assign(count, static_cast<float>(comm.size()));
        reduce(comm, x, DType::kFloat32, ReduceOp::kAverage, by_name);
        for (const float v : x) CHECK_EQ(v, static_cast<float>(comm.size() - step));
      }
    }
    CHECK_EQ(join(comm), comm.size() - 1);
  }
  std::vector<float> x(5, 1.0f);
  reduce(comm, x, DType::kFloat32, ReduceOp::kSum, by_name);
  CHECK_EQ(x[4], static_cast<float>(comm.size()));
}

}  // namespace

TEST(uneven_steps_in_order_and_by_name) {
  for (const Settings& settings : kWorlds) {
    for (const int n : {1, 2, 4}) {
      for (const bool by_name : {false, true}) {
        run_ranks(n, settings, [&](Communicator& comm) { uneven_steps(comm, by_name); });
      }
    }
  }
}

// Rank 0 decides the order of names, so it must do so while it is joined too; of two that join last, the highest
// counts.
TEST(rank_0_joins_first) {
  for (const Settings& settings : kWorlds) {
    run_ranks(3, settings, [](Communicator& comm) {
      for (int step = 0; comm.rank() > 0 && step < 3; ++step) {
        std::vector<float> x(10, 1.0f);
        reduce(comm, x, DType::kFloat32, ReduceOp::kSum, step == 1);
        CHECK_EQ(x[9], 2.0f);
      }
      CHECK_EQ(join(comm), 2);
    });
  }
}

TEST(no_operator_is_changed) {
  run_ranks(2, [](Communicator& comm) {
    for (const ReduceOp op :
         {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct, ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor}) {
      if (comm.rank() == 0) {
        std::vector<int32_t> ints(3, -5);
        reduce(comm, ints, DType::kInt32, op, false);
        CHECK_EQ(ints[2], -5);
        std::vector<uint16_t> unsigned_ints(3, 5);
        reduce(comm, unsigned_ints, DType::kUInt16, op, false);
        CHECK_EQ(unsigned_ints[2], uint16_t{5});
        std::vector<uint64_t> long_ints(3, uint64_t{5} << 61);
        reduce(comm, long_ints, DType::kUInt64, op, false);
        CHECK_EQ(long_ints[2], uint64_t{5} << 61);
        if (!is_bitwise(op)) {
          std::vector<double> doubles(3, -5);
          reduce(comm, doubles, DType::kFloat64, op, false);
          CHECK_EQ(doubles[2], -5.0);
          run(comm, {.kind = Kind::kAllReduce,
                     .in = doubles.data(),
                     .out = doubles.data(),
                     .count = 3,
                     .dtype = DType::kFloat64,
                     .op = op,
                     .prescale = 0});
          CHECK_EQ(doubles[2], 0.0);
        }
        std::vector<uint8_t> bytes(3, 1);
        reduce(comm, bytes, DType::kBool, op, false);
        CHECK_EQ(bytes[2], uint8_t{1});
      }
      join(comm);
    }
  });
}

TEST(scaled_integers_beside_a_joined_rank) {
  run_ranks(2, [](Communicator& comm) {
    if (comm.rank() == 0) {
      for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kSum}) {
        for (const double prescale : {0.5, -2.0}) {
          int16_t x = 6;
          const Request request{.kind = Kind::kAllReduce,
                                .in = &x,
                                .out = &x,
                                .count = 1,
                                .dtype = DType::kInt16,
                                .op = op,
                                .prescale = prescale};
          run(comm, request);
          CHECK_EQ(x, static_cast<int16_t>(6 * prescale));
          Request product = request;
          product.op = ReduceOp::kProduct;
          CHECK_THROWS(run(comm, product), JoinedError, "product of integers");
        }
      }
    }
    join(comm);
  });
}

TEST(other_collectives_are_errors_and_the_job_goes_on) {
  for (const Settings& settings : kWorlds) {
    run_ranks(3, settings, [](Communicator& comm) {
      if (comm.rank() != 1) {
        float x = 1;
        CHECK_THROWS(run(comm, {.kind = Kind::kBroadcast, .in = &x, .out = &x, .count = 4, .name = "w"}), JoinedError,
                     "rank 1 called join");
        CHECK_THROWS(run(comm, {.kind = Kind::kBarrier}), JoinedError, "ranks 0, 2 called barrier; rank 1 called join");
        run(comm, {.kind = Kind::kAllReduce, .in = &x, .out = &x, .count = 1});
        CHECK_EQ(x, 2.0f);
      }
      join(comm);
      run(comm, {.kind = Kind::kBarrier});
    });
  }
}

// What arrived and what is kept are all that was given. Rank 0 carries a half of its node's sum, and joins early.
TEST(nothing_is_lost_beside_a_rank_that_keeps_no_errors) {
  constexpr size_t kCount = 30000;
  Settings levels = test_settings();
  levels.nodes = {0, 0, 1, 1};
  for (Settings settings : {levels, without_shared_memory()}) {
    settings.compress_local = true;
    for (const char* codec : {"int8", "topk 0.1 gather", "topk 0.1 owners"}) {
      for (const bool by_name : {false, true}) {
        std::mutex mutex;
        std::vector<double> missing(kCount);  // given, but neither arrived nor kept
        const int n = settings.nodes.empty() ? 3 : 4;
        run_ranks(n, settings, [&](Communicator& comm) {
          std::vector<float> error(kCount);
          std::vector<double> own(kCount);
          for (int step = 0; step < 5; ++step) {
            const bool without_rank_0 = step == 1 || step == 2;
            if (step == (comm.rank() == 0 ? 1 : 3)) join(comm);
            if (without_rank_0 && comm.rank() == 0) continue;
            std::vector<float> x(kCount);
            for (size_t i = 0; i < kCount; ++i) {
              x[i] = static_cast<float>((i * 7919 + static_cast<size_t>(100 * comm.rank() + step) * 131) % 101) - 50;
              own[i] += x[i];
            }
            Request request{.kind = Kind::kAllReduce,
                            .in = x.data(),
                            .out = x.data(),
                            .count = kCount,
                            .encoding = kernels::encoding_named(codec),
                            .feedback = {.error = error.data()},
                            .name = "x"};
            const auto operation = by_name ? comm.submit_by_name(request) : comm.submit(request);
            comm.wait(*operation);
            CHECK_EQ(operation->encoded, !without_rank_0);
            for (size_t i = 0; comm.rank() == 1 && i < kCount; ++i) own[i] -= x[i];  // the same on every rank
          }
          const std::lock_guard lock(mutex);
          for (size_t i = 0; i < kCount; ++i) missing[i] += own[i] - error[i];
        });
        for (const double value : missing) CHECK(std::fabs(value) <= (codec[0] == 't' ? 0 : 1e-3));
      }
    }
  }
}

TEST(a_stall_ends_the_job_when_so_configured) {
  Settings settings = test_settings();
  settings.stall_check_disable = false;
  settings.stall_check_time_s = 0.1;
  settings.stall_shutdown_time_s = 0.3;
  for (const bool by_name : {false, true}) {
    auto world = connect_threads(2, settings);
    std::vector<float> x(1, 1.0f);
    CHECK_THROWS(reduce(*world[0], x, DType::kFloat32, ReduceOp::kSum, by_name), TimeoutError,
                 "Missing: rank 1. Rank 1 has finished no operation yet");
    CHECK_THROWS(run(*world[1], {.kind = Kind::kBarrier}), TimeoutError, "DCOLL_STALL_SHUTDOWN_TIME");
  }
}

TEST(listening_for_stalls_costs_nothing) {
  Settings settings = test_settings();
  settings.stall_check_disable = true;
  for (const auto& rank : connect_threads(2, settings)) CHECK(rank->members().diagnosis == nullptr);
  settings.stall_check_disable = false;
  // Within a node the thread sleeps until it is woken; between nodes it has to look for itself.
  for (const auto& rank : connect_threads(2, settings))
    CHECK(rank->members().diagnosis && rank->members().transport->announces_notes());
  settings.nodes = {0, 0, 1, 1};
  for (const auto& rank : connect_threads(4, settings))
    CHECK(rank->members().diagnosis && !rank->members().transport->announces_notes());
}

TEST_MAIN
