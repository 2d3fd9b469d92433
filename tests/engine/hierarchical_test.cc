// Collectives on two levels, ranks as threads on several pretended nodes: against the sum of all operands, exactly, and
// the same bits on all ranks; agreement and failures across nodes.
#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>

#include "base/error.h"
#include "engine/levels/node_map.h"
#include "rank_threads.h"
#include "support/check.h"
#include "values.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

using Nodes = std::vector<int>;

const std::vector<Nodes> kPlacements = {
    {0, 0, 1, 1},              // node by node
    {0, 1, 0, 1},              // round-robin
    {0, 0, 0, 1},              // a node of one rank
    {0, 0, 1, 2, 2, 2, 2},     // 2 + 1 + 4
    {0, 0, 0, 0, 0, 1, 1, 1},  // teams of several ranks
};

Settings on_nodes(const Nodes& nodes, int slice_kb = 64, int slots = 4) {
  Settings settings = test_settings();
  settings.nodes = nodes;
  settings.slice_kb = slice_kb;
  settings.slots = slots;
  return settings;
}

void run_on(const Nodes& nodes, const std::function<void(Communicator&)>& body) {
  run_ranks(static_cast<int>(nodes.size()), on_nodes(nodes), body);
}

// Who brings memory that its node's peers have mapped.
enum class Mapped { kNobody, kSome, kAll };

struct Case {
  size_t count = 0;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  Mapped mapped = Mapped::kNobody;
  bool in_place = false;
  double prescale = 1.0, postscale = 1.0;
  std::string algo = "";
};

// Small enough for products and 8-bit sums of 8 ranks; a multiple of the rank count where an average must be exact.
double operand(const Case& c, int rank, size_t i, int n) {
  if (c.dtype == DType::kBool) return i % (rank + 2) != 0;
  if (c.op == ReduceOp::kProduct) return (i + rank) % 2 + 1;
  return c.op == ReduceOp::kAverage ? ((i + rank) % 3) * n : (i * 7 + rank * 5) % 11;
}

double expected(const Case& c, size_t i, int n) {
  double value = operand(c, 0, i, n) * c.prescale;
  for (int rank = 1; rank < n; ++rank) {
    const double next = operand(c, rank, i, n) * c.prescale;
    value = combine(value, next, c.dtype, c.op);
  }
  return (c.op == ReduceOp::kAverage ? value / n : value) * c.postscale;
}

void check(Communicator& comm, const Case& c) {
  const size_t bytes = c.count * dtype_bytes(c.dtype);
  const bool mapped = c.mapped == Mapped::kAll || (c.mapped == Mapped::kSome && comm.rank() % 3 == 0);
  const auto in = mapped ? comm.alloc(bytes) : Memory::plain(bytes);
  const auto out = c.in_place ? in : mapped ? comm.alloc(bytes) : Memory::plain(bytes);
  std::vector<double> values(c.count);
  for (size_t i = 0; i < c.count; ++i) values[i] = operand(c, comm.rank(), i, comm.size());
  const std::vector<std::byte> mine = encode(values, c.dtype);
  if (bytes > 0) std::memcpy(in->data(), mine.data(), bytes);
  run(comm, {.kind = Kind::kAllReduce,
             .in = in->data(),
             .out = out->data(),
             .count = c.count,
             .dtype = c.dtype,
             .op = c.op,
             .prescale = c.prescale,
             .postscale = c.postscale,
             .algo = c.algo});
  const std::vector<double> got = decode(out->data(), c.count, c.dtype);
  for (size_t i = 0; i < c.count; ++i) CHECK_EQ(got[i], expected(c, i, comm.size()));
  if (!c.in_place && bytes > 0) CHECK(std::memcmp(in->data(), mine.data(), bytes) == 0);  // the operand is untouched
}

}  // namespace

TEST(who_shares_memory) {
  const NodeMap map = NodeMap::of({7, 3, 7, 3, 3, 9}, 4);
  CHECK_EQ(map.num_nodes(), 3);
  CHECK_EQ(map.node, 1);
  CHECK_EQ(map.local_rank, 2);
  CHECK(map.ranks == (std::vector<std::vector<int>>{{0, 2}, {1, 3, 4}, {5}}));
  CHECK_EQ(map.carriers, 1);
  CHECK(map.carriers_of(0) == (std::vector<int>{0, 1, 5}));
  CHECK(map.has_two_levels());
  CHECK(!NodeMap::of({0, 0, 0}, 1).has_two_levels());
  CHECK(!NodeMap::of({0, 1, 2}, 1).has_two_levels());
  CHECK_EQ(NodeMap::of({0, 0, 1, 0, 1}, 0).carriers, 2);
}

TEST(every_dtype_and_op) {
  constexpr size_t kMany = kSanitized ? 9001 : 30011;
  for (const Nodes& nodes : {kPlacements[0], kPlacements[3]}) {
    run_on(nodes, [](Communicator& comm) {
      for (const DType dtype : kDTypes) {
        for (const ReduceOp op : kOps) {
          if (!defined(dtype, op)) continue;
          check(comm, {.count = 13, .dtype = dtype, .op = op});    // beside the post
          check(comm, {.count = 1001, .dtype = dtype, .op = op});  // in the small slots
          check(comm, {.count = kMany, .dtype = dtype, .op = op, .in_place = op == ReduceOp::kSum});
          check(comm, {.count = kMany, .dtype = dtype, .op = op, .mapped = Mapped::kAll, .in_place = true});
        }
      }
    });
  }
}

TEST(every_count_and_memory) {
  for (const Nodes& nodes : kPlacements) {
    run_on(nodes, [](Communicator& comm) {
      const size_t n = comm.size();
      for (const size_t count : {size_t{0}, size_t{1}, n - 1, n, n + 1, size_t{22}, size_t{23}, size_t{27},
                                 size_t{2048}, size_t{4097}, size_t{16385}, size_t{kSanitized ? 40009 : 100003}}) {
        for (const Mapped mapped : {Mapped::kNobody, Mapped::kSome, Mapped::kAll}) {
          check(comm, {.count = count, .mapped = mapped, .in_place = count % 2 == 0});
        }
      }
    });
  }
}

// Slices of 1 KiB: many pieces, so that slots are used again and several pieces are under way.
TEST(many_pieces) {
  for (const Nodes& nodes : kPlacements) {
    for (const int slots : {1, 4}) {
      run_ranks(static_cast<int>(nodes.size()), on_nodes(nodes, 1, slots), [](Communicator& comm) {
        for (const Mapped mapped : {Mapped::kNobody, Mapped::kSome, Mapped::kAll}) {
          for (const size_t count : {size_t{4099}, kSanitized ? size_t{30011} : size_t{70001}}) {
            check(comm, {.count = count, .mapped = mapped, .in_place = true});
            check(comm, {.count = count, .dtype = DType::kFloat16, .op = ReduceOp::kMax, .mapped = mapped});
          }
        }
      });
    }
  }
}

TEST(large) {
  run_on(kPlacements[0], [](Communicator& comm) {
    for (const Mapped mapped : {Mapped::kNobody, Mapped::kAll}) {
      check(comm,
            {.count = kSanitized ? 400001 : 1500001, .op = ReduceOp::kAverage, .mapped = mapped, .in_place = true});
    }
  });
}

// One to four carriers on shared cores, one operation behind the other.
TEST(any_number_of_carriers) {
  for (const Nodes& nodes : {Nodes{0, 0, 0, 0, 1, 1, 1, 1}, Nodes{0, 0, 1, 1, 1}}) {
    run_on(nodes, [](Communicator& comm) {
      for (const size_t kib : std::vector<size_t>{96, 400, 1100, 200, 600, 800, 383, 384}) {
        if (kSanitized && kib % 400 == 200) continue;
        for (const Mapped mapped : {Mapped::kNobody, Mapped::kSome, Mapped::kAll}) {
          check(comm, {.count = kib * 256 + 3, .mapped = mapped, .in_place = kib % 3 == 0});
        }
      }
    });
  }
}

TEST(factors_apply_once) {
  for (const Nodes& nodes : {kPlacements[1], kPlacements[2]}) {
    run_on(nodes, [](Communicator& comm) {
      for (const size_t count : {size_t{5}, size_t{1000}, size_t{40000}}) {
        for (const Mapped mapped : {Mapped::kNobody, Mapped::kSome, Mapped::kAll}) {
          for (const bool in_place : {false, true}) {
            check(comm, {.count = count, .mapped = mapped, .in_place = in_place, .prescale = 2.0, .postscale = 0.5});
            check(comm, {.count = count,
                         .op = ReduceOp::kAverage,
                         .mapped = mapped,
                         .in_place = in_place,
                         .prescale = 4.0,
                         .postscale = 2.0});
            check(comm, {.count = count,
                         .dtype = DType::kInt16,
                         .mapped = mapped,
                         .in_place = in_place,
                         .prescale = -3.0,
                         .postscale = 2.0});
          }
        }
      }
    });
  }
}

// Sums of 1e8, 1.25 and -1e8 in float32 depend on the order: it must be the same everywhere, whatever the memory.
TEST(same_bits_on_all_ranks) {
  for (const Nodes& nodes : kPlacements) {
    for (const size_t count : {size_t{9}, size_t{1500}, size_t{50021}}) {
      std::mutex mutex;
      std::vector<float> first;
      run_on(nodes, [&](Communicator& comm) {
        for (const bool mapped : {false, true}) {
          const auto memory = mapped ? comm.alloc(count * 4) : Memory::plain(count * 4);
          auto* data = reinterpret_cast<float*>(memory->data());
          for (size_t i = 0; i < count; ++i) {
            data[i] = (comm.rank() % 3 == 0 ? 1e8f : comm.rank() % 3 == 1 ? 1.25f : -1e8f) + static_cast<float>(i % 7);
          }
          run(comm, {.kind = Kind::kAllReduce, .in = data, .out = data, .count = count});
          const std::lock_guard lock(mutex);
          if (first.empty()) first.assign(data, data + count);
          CHECK(std::memcmp(first.data(), data, count * sizeof(float)) == 0);
        }
      });
    }
  }
}

// More leaders than talk to each other directly.
TEST(many_nodes) {
  run_on({0, 1, 2, 3, 4, 5, 6, 7, 8, 8}, [](Communicator& comm) {
    for (const size_t count : {size_t{0}, size_t{1}, size_t{1000}, size_t{20011}}) check(comm, {.count = count});
    float x = 1;
    const size_t odd = comm.rank() == 9 ? 0 : 1;
    CHECK_THROWS(run(comm, {.kind = Kind::kAllReduce, .in = &x, .out = &x, .count = odd}), MismatchError,
                 "rank 9 called");
    check(comm, {.count = 100});
  });
}

TEST(asked_for_by_name) {
  for (const Nodes& nodes : {Nodes{0, 0, 1}, Nodes{0, 0, 0}, Nodes{0, 1, 2}, Nodes{0}}) {
    run_on(nodes, [](Communicator& comm) {
      for (const char* algo : {"hierarchical", "ring", "auto"}) {
        for (const size_t count : {size_t{3}, size_t{20000}}) check(comm, {.count = count, .algo = algo});
      }
    });
  }
}

// In the node of the odd rank or in another one, of any size: every rank hears every rank's words, and the job goes on.
TEST(mismatch_across_nodes) {
  for (const Nodes& nodes : kPlacements) {
    const int n = static_cast<int>(nodes.size());
    for (const int odd : {0, n - 1}) {
      run_on(nodes, [odd](Communicator& comm) {
        std::vector<float> x(6000, 1);
        for (const size_t count : {size_t{1}, size_t{100}, size_t{6000}}) {
          const size_t mine = comm.rank() == odd ? count - 1 : count;
          const Request request{.kind = Kind::kAllReduce, .in = x.data(), .out = x.data(), .count = mine};
          for (const char* words : {" float32)", "sum of "}) CHECK_THROWS(run(comm, request), MismatchError, words);
          CHECK_THROWS(run(comm, request), MismatchError,
                       "rank " + std::to_string(odd) + " called allreduce (sum of " + std::to_string(count - 1));
        }
        Request other{.kind = Kind::kBarrier};
        if (comm.rank() == odd) other = {.kind = Kind::kAllReduce, .in = x.data(), .out = x.data(), .count = 900};
        CHECK_THROWS(run(comm, other), MismatchError, "called barrier");
        check(comm, {.count = 10});
        check(comm, {.count = 20000});
      });
    }
  }
}

// The other collectives agree on two levels too.
TEST(other_collectives) {
  for (const Nodes& nodes : {kPlacements[1], kPlacements[3]}) {
    run_on(nodes, [](Communicator& comm) {
      const int n = comm.size();
      for (int round = 0; round < 20; ++round) {
        std::vector<int32_t> x(50 + round, comm.rank());
        run(comm,
            {.kind = Kind::kBroadcast, .in = x.data(), .out = x.data(), .count = x.size() * 4, .root = round % n});
        CHECK(x == std::vector<int32_t>(x.size(), round % n));
        const int32_t mine = comm.rank();
        const auto gathered = run(comm, {.kind = Kind::kAllGather, .in = &mine, .count = 1, .row_elems = 4});
        for (int rank = 0; rank < n; ++rank) {
          CHECK_EQ(reinterpret_cast<const int32_t*>(gathered->output->data())[rank], rank);
        }
        run(comm, {.kind = Kind::kBarrier});
        check(comm, {.count = static_cast<size_t>(1000 * round)});
      }
    });
  }
}

namespace {

// What every rank but `absent` fails with while that one stays away.
template <class Failure>
std::vector<std::string> failures(const Nodes& nodes, const Settings& settings, size_t count, int absent,
                                  const std::function<void(Communicator&)>& instead) {
  const int n = static_cast<int>(nodes.size());
  auto world = connect_threads(n, settings);
  std::vector<std::string> texts(n);
  on_threads(n, [&](int rank) {
    if (rank == absent) {
      check(*world[rank], {.count = 5});
      return instead(*world[rank]);
    }
    std::vector<float> x(count, 1);
    try {
      check(*world[rank], {.count = 5});  // where it may be heard already that another rank has failed since
      run(*world[rank], {.kind = Kind::kAllReduce, .in = x.data(), .out = x.data(), .count = count});
    } catch (const Failure& e) {
      texts[rank] = e.what();
    }
  });
  return texts;
}

}  // namespace

TEST(timeout_names_the_missing_rank_everywhere) {
  for (const int absent : {0, 1, 3}) {  // a leader, a rank that is none, a node of one rank
    const Nodes nodes{0, 0, 0, 1};
    Settings settings = on_nodes(nodes);
    settings.timeout_s = 0.5;
    const auto texts = failures<TimeoutError>(nodes, settings, 20000, absent, [](Communicator&) {});
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == absent) continue;
      const std::string want = "waiting for rank " + std::to_string(absent) + " of 4";
      if (texts[rank].find(want) == std::string::npos) CHECK_EQ(texts[rank], want);
    }
  }
}

TEST(failure_reaches_all_nodes) {
  for (const int failing : {0, 3}) {
    const Nodes nodes{0, 0, 1, 1};
    const auto texts = failures<PeerError>(nodes, on_nodes(nodes), 20000, failing,
                                           [](Communicator& comm) { comm.fail("RuntimeError: loss is NaN"); });
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == failing) continue;
      CHECK(texts[rank].find("rank " + std::to_string(failing) + ": RuntimeError: loss is NaN") != std::string::npos);
    }
  }
}

// A leader's memory, where its node reads the verdict, goes with it. Between nodes nobody sees who leaves, but here,
// where messages go through memory as well: so a rank waits for the ranks of the other nodes, and for none of its own.
TEST(leaders_that_leave_at_once_leave_nobody_behind) {
  const Nodes nodes{0, 0, 0, 1, 1, 1};
  for (int round = 0; round < 30; ++round) {
    auto world = connect_threads(static_cast<int>(nodes.size()), on_nodes(nodes));
    std::atomic<int> left[2] = {0, 0};
    on_threads(static_cast<int>(nodes.size()), [&](int rank) {
      const int node = nodes[static_cast<size_t>(rank)];
      run(*world[rank], {.kind = Kind::kBarrier});
      world[rank]->close();
      const std::string failure = world[rank]->failure();
      ++left[node];
      while (left[1 - node] < 3) std::this_thread::yield();
      world[rank].reset();
      CHECK_EQ(failure, std::string());
    });
  }
}

TEST_MAIN
