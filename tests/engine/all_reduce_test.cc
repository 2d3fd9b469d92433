// All-reduce of the engine against gather + reduce, exactly: every dtype, operator, algorithm, memory and awkward
// count.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "plan/algorithms.h"
#include "rank_threads.h"
#include "support/check.h"
#include "values.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

// Small enough for products and 8-bit sums of 8 ranks; a multiple of the rank count where an average must be exact.
double operand(int rank, size_t i, int n, DType dtype, ReduceOp op) {
  if (dtype == DType::kBool) return i % (rank + 2) != 0;
  if (op == ReduceOp::kProduct) return (i + rank) % 2 + 1;
  return op == ReduceOp::kAverage ? ((i + rank) % 3) * n : (i * 7 + rank * 5) % 11;
}

double expected(size_t i, int n, DType dtype, ReduceOp op) {
  double value = operand(0, i, n, dtype, op);
  for (int rank = 1; rank < n; ++rank) value = combine(value, operand(rank, i, n, dtype, op), dtype, op);
  return op == ReduceOp::kAverage ? value / n : value;
}

// Every algorithm there is, by its name, and what "" and "auto" choose.
std::vector<std::string> algorithms_and(std::vector<std::string> names) {
  for (const plan::Algorithm& algorithm : plan::algorithms()) {
    if (algorithm.collective == plan::Collective::kAllReduce) names.emplace_back(algorithm.name);
  }
  return names;
}

struct Case {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  std::string algo;
  size_t count = 0;
  bool mapped = false;
  bool in_place = false;
};

void check_all_reduce(Communicator& comm, const Case& c) {
  const size_t bytes = c.count * dtype_bytes(c.dtype);
  std::vector<double> values(c.count);
  for (size_t i = 0; i < c.count; ++i) values[i] = operand(comm.rank(), i, comm.size(), c.dtype, c.op);
  const std::vector<std::byte> mine = encode(values, c.dtype);
  const auto in = c.mapped ? comm.alloc(bytes) : Memory::plain(bytes);
  const auto out = c.in_place ? in : c.mapped ? comm.alloc(bytes) : Memory::plain(bytes);
  if (bytes > 0) std::memcpy(in->data(), mine.data(), bytes);
  run(comm, {.kind = Kind::kAllReduce,
             .in = in->data(),
             .out = out->data(),
             .count = c.count,
             .dtype = c.dtype,
             .op = c.op,
             .algo = c.algo});
  const std::vector<double> got = decode(out->data(), c.count, c.dtype);
  for (size_t i = 0; i < c.count; ++i) CHECK_EQ(got[i], expected(i, comm.size(), c.dtype, c.op));
  if (!c.in_place && bytes > 0) CHECK(std::memcmp(in->data(), mine.data(), bytes) == 0);  // the operand is untouched
}

}  // namespace

TEST(every_dtype_and_op) {
  for (int n : {1, 2, 3, 5}) {
    if (kSanitized && n != 3) continue;
    run_ranks(n, [](Communicator& comm) {
      for (DType dtype : kDTypes) {
        for (ReduceOp op : kOps) {
          if (!defined(dtype, op)) continue;
          check_all_reduce(comm, {dtype, op, "direct", kSanitized ? 20001 : 50001, false,
                                  op == ReduceOp::kSum});  // staged, for each size
          for (const std::string& algo : algorithms_and({})) {
            for (bool mapped : {false, true}) {
              check_all_reduce(comm, {dtype, op, algo, 37, mapped, false});
              check_all_reduce(comm, {dtype, op, algo, 9001, mapped, true});
            }
          }
        }
      }
    });
  }
}

TEST(every_count) {
  for (int n = 1; n <= 8; ++n) {
    if (kSanitized && n != 3 && n != 5) continue;
    run_ranks(n, [n](Communicator& comm) {
      const size_t s = n;
      for (size_t count :
           {size_t{0}, size_t{1}, s - 1, s, s + 1, size_t{17}, size_t{2048}, size_t{2049}, size_t{4095}, size_t{4096},
            size_t{4097}, size_t{16383}, size_t{16385}, size_t{kSanitized ? 40009 : 100003}}) {
        for (const std::string& algo : algorithms_and({""})) {
          for (bool mapped : {false, true}) {
            check_all_reduce(comm, {DType::kFloat32, ReduceOp::kSum, algo, count, mapped, count % 2 == 0});
          }
        }
      }
    });
  }
}

// Many rounds: slices of 1 KiB, one or two slots.
TEST(small_slices) {
  for (int slots : {1, 2}) {
    Settings settings = test_settings();
    settings.slice_kb = 1;
    settings.slots = slots;
    for (int n : {2, 3, 4, 7}) {
      run_ranks(n, settings, [](Communicator& comm) {
        for (const std::string& algo : algorithms_and({})) {
          for (size_t count : {size_t{1000}, size_t{20011}}) {
            check_all_reduce(comm, {DType::kFloat32, ReduceOp::kSum, algo, count, false, false});
            check_all_reduce(comm, {DType::kFloat16, ReduceOp::kMax, algo, count, false, true});
          }
        }
      });
    }
  }
}

// Some ranks bring mapped memory and some their own.
TEST(mixed_memory) {
  for (int n : {2, 3, 4}) {
    run_ranks(n, [](Communicator& comm) {
      for (size_t count : {size_t{100}, size_t{5000}, size_t{300000}}) {
        for (bool in_place : {false, true}) {
          check_all_reduce(comm, {DType::kFloat32, ReduceOp::kSum, "", count, comm.rank() % 2 == 0, in_place});
          check_all_reduce(comm, {DType::kFloat16, ReduceOp::kAverage, "", count, comm.rank() == 0, in_place});
        }
      }
    });
  }
}

// Large enough for many staged pieces and many two-shot pieces per rank.
TEST(large) {
  run_ranks(2, [](Communicator& comm) {
    for (bool mapped : {false, true}) {
      check_all_reduce(comm, {DType::kFloat32, ReduceOp::kAverage, "", 1500001, mapped, true});
    }
  });
}

// The fused forms add in rank order, exactly as the schedule they stand for: the same bits, not just nearly so. Sums of
// 1e8, 1.25 and -1e8 in float32 depend on the order.
TEST(fused_equals_schedule) {
  constexpr size_t kCount = 300001;  // several pieces, also of eight ranks
  for (int n : {2, 3, 4, 8}) {
    auto value = [](int rank, size_t i) {
      return (rank % 3 == 0 ? 1e8f : rank % 3 == 1 ? 1.25f : -1e8f) + static_cast<float>(i % 7);
    };
    auto reduce = [&](Communicator& comm, bool mapped, size_t count, const float* want) {
      const auto memory = mapped ? comm.alloc(count * 4) : Memory::plain(count * 4);
      auto* data = reinterpret_cast<float*>(memory->data());
      for (size_t i = 0; i < count; ++i) data[i] = value(comm.rank(), i);
      run(comm, {.kind = Kind::kAllReduce, .in = data, .out = data, .count = count, .algo = "direct"});
      CHECK(std::memcmp(data, want, count * sizeof(float)) == 0);
    };
    std::vector<float> want(kCount);
    for (size_t i = 0; i < kCount; ++i) {
      want[i] = value(0, i);
      for (int rank = 1; rank < n; ++rank) want[i] += value(rank, i);
    }
    run_ranks(n, without_shared_memory(), [&](Communicator& comm) { reduce(comm, false, kCount, want.data()); });
    run_ranks(n, [&](Communicator& comm) {
      for (bool mapped : {false, true}) {
        for (size_t count : {size_t{1000}, size_t{50000}, kCount})
          reduce(comm, mapped, count, want.data());  // one-shot and beyond
      }
    });
  }
}

// As between nodes: the handshake by messages, and schedules only.
TEST(by_messages) {
  for (int n = 1; n <= 8; ++n) {
    run_ranks(n, without_shared_memory(), [n](Communicator& comm) {
      for (size_t count : {size_t{0}, size_t{1}, static_cast<size_t>(n), size_t{4097}, size_t{60001}}) {
        for (const std::string& algo : algorithms_and({"auto"})) {
          check_all_reduce(comm, {DType::kFloat32, ReduceOp::kAverage, algo, count, false, count % 2 == 0});
          check_all_reduce(comm, {DType::kInt64, ReduceOp::kSum, algo, count, false, count % 2 == 1});
        }
      }
    });
  }
}

// Synchronous small calls, which try to finish on the spot, mixed with asynchronous ones and with late peers.
TEST(on_the_spot_or_queued) {
  for (int n : {2, 3}) {
    run_ranks(n, [n](Communicator& comm) {
      for (int i = 0; i < 300; ++i) {
        float async = 2, x = static_cast<float>(i), y = 1;
        const Request a{.kind = Kind::kAllReduce, .in = &async, .out = &async, .count = 1};
        const Request b{.kind = Kind::kAllReduce, .in = &x, .out = &x, .count = 1};
        const Request c{.kind = Kind::kAllReduce, .in = &y, .out = &y, .count = 1, .op = ReduceOp::kAverage};
        std::shared_ptr<Operation> queued;
        if (i % 3 == 0) queued = comm.submit(a);
        if (i % 50 == comm.rank()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        for (const Request& request : {b, c}) {
          if (auto operation = comm.run_or_submit(request)) comm.wait(*operation);
        }
        CHECK_EQ(x, static_cast<float>(i * n));
        CHECK_EQ(y, 1.0f);
        if (queued) {
          comm.wait(*queued);
          CHECK_EQ(async, 2.0f * n);
        }
      }
      float x = 1;
      const Request odd{
          .kind = Kind::kAllReduce, .in = &x, .out = &x, .count = comm.rank() == 0 ? size_t{1} : size_t{0}};
      CHECK_THROWS(comm.wait(*comm.run_or_submit(odd)), MismatchError, "rank 0 called");
    });
  }
}

TEST(scaling) {
  for (const std::string& algo : algorithms_and({""})) {
    run_ranks(3, [algo](Communicator& comm) {
      for (size_t count : {size_t{5}, size_t{40000}}) {
        std::vector<float> data(count);
        for (size_t i = 0; i < count; ++i) data[i] = static_cast<float>(i % 5);
        run(comm, {.kind = Kind::kAllReduce,
                   .in = data.data(),
                   .out = data.data(),
                   .count = count,
                   .op = ReduceOp::kSum,
                   .prescale = 2.0,
                   .postscale = 0.5,
                   .algo = algo});
        for (size_t i = 0; i < count; ++i) CHECK_EQ(data[i], static_cast<float>(i % 5) * 3);
      }
    });
  }
}

// 0.3 of each, truncated, then 1.7 of their sum, truncated: in float64, as Horovod does it.
TEST(integers_are_scaled_too) {
  for (const std::string& algo : algorithms_and({""})) {
    run_ranks(3, [algo](Communicator& comm) {
      for (size_t count : {size_t{5}, size_t{40000}}) {
        for (const DType dtype : {DType::kInt8, DType::kInt16, DType::kInt32, DType::kInt64}) {
          std::vector<double> values(count), want(count);
          for (size_t i = 0; i < count; ++i) {
            values[i] = static_cast<double>(i % 41) - 20;
            want[i] = std::trunc(std::trunc(values[i] * 0.3) * 3 * 1.7);
          }
          std::vector<std::byte> data = encode(values, dtype);
          run(comm, {.kind = Kind::kAllReduce,
                     .in = data.data(),
                     .out = data.data(),
                     .count = count,
                     .dtype = dtype,
                     .op = ReduceOp::kSum,
                     .prescale = 0.3,
                     .postscale = 1.7,
                     .algo = algo});
          CHECK(decode(data.data(), count, dtype) == want);
        }
      }
    });
  }
}

TEST(arguments_are_checked) {
  run_ranks(2, [](Communicator& comm) {
    float x = 1;
    const Request good{.kind = Kind::kAllReduce, .in = &x, .out = &x, .count = 1};
    Request request = good;
    CHECK_THROWS(request.algo = "bogus", ArgumentError, "no algorithm 'bogus'; allowed are auto, ");
    request.dtype = DType::kBool;
    request.op = ReduceOp::kAverage;
    CHECK_THROWS(comm.submit(request), ArgumentError, "average of bool");
    request = good;
    request.dtype = DType::kInt32;
    request.prescale = std::numeric_limits<double>::infinity();
    CHECK_THROWS(comm.submit(request), ArgumentError, "of integers finite factors");
    request.dtype = DType::kBool;
    request.prescale = 0.5;
    CHECK_THROWS(comm.submit(request), ArgumentError, "factors need a number type");
    CHECK_THROWS(comm.submit({.kind = Kind::kBroadcast, .in = &x, .out = &x, .count = 4, .root = 2}), ArgumentError,
                 "root rank 2 does not exist; allowed are 0 to 1");
    run(comm, good);
    CHECK_EQ(x, 2.0f);
  });
}

TEST_MAIN
