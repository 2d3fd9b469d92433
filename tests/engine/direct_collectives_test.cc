// Broadcast, all-gather, reduce-scatter and all-to-all inside a node, exactly: in place, through slots and mixed; sizes
// around every threshold; asynchronous, synchronous and by the schedules they replace.
#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "kernels/reduce.h"
#include "rank_threads.h"
#include "support/check.h"
#include "values.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

enum class Where { kPlain, kMapped, kOddMapped, kFirstMapped };
constexpr Where kWheres[] = {Where::kPlain, Where::kMapped, Where::kOddMapped, Where::kFirstMapped};

bool is_mapped(Where where, int rank) {
  switch (where) {
    case Where::kPlain:
      return false;
    case Where::kMapped:
      return true;
    case Where::kOddMapped:
      return rank % 2 == 1;
    case Where::kFirstMapped:
      return rank == 0;
  }
  return false;
}

std::shared_ptr<Memory> allocate(Communicator& comm, Where where, size_t bytes) {
  return is_mapped(where, comm.rank()) ? comm.alloc(bytes) : Memory::plain(bytes);
}

// Submitted like any operation, or tried on the spot as a synchronous call does.
enum class How { kQueued, kNow };

std::shared_ptr<Operation> call(Communicator& comm, How how, Request request) {
  if (how == How::kQueued) return run(comm, std::move(request));
  auto operation = comm.run_or_submit(std::move(request));
  comm.wait(*operation);
  return operation;
}

// A byte that tells rank, purpose and place.
std::byte mark(int from, int to, size_t i) { return static_cast<std::byte>(from * 37 + to * 101 + i * 7 + i / 251); }

void fill(std::byte* at, size_t count, int from, int to) {
  for (size_t i = 0; i < count; ++i) at[i] = mark(from, to, i);
}

size_t count_wrong(const std::byte* at, size_t count, int from, int to) {
  size_t wrong = 0;
  for (size_t i = 0; i < count; ++i) wrong += at[i] != mark(from, to, i);
  return wrong;
}

Settings spinning_settings() {
  Settings settings = test_settings();
  settings.spin_us = 50;  // so that How::kNow is tried, however few cores there are
  return settings;
}

Settings schedules_only() {
  Settings settings = spinning_settings();
  settings.algo = "ring";
  return settings;
}

void for_every_way(int n, const std::function<void(Communicator&, Where, How)>& body) {
  for (const Settings& settings : {spinning_settings(), schedules_only()}) {
    run_ranks(n, settings, [&](Communicator& comm) {
      for (Where where : kWheres) {
        for (How how : {How::kQueued, How::kNow}) body(comm, where, how);
      }
    });
  }
}

constexpr size_t kSizes[] = {0,    1,     63,    88,    89,    2048,  2049,  8192,
                             8193, 16384, 16385, 32768, 32769, 65536, 65537, 300007};

}  // namespace

TEST(broadcast) {
  for (int n = 1; n <= (kSanitized ? 3 : 8); ++n) {
    for_every_way(n, [n](Communicator& comm, Where where, How how) {
      for (size_t bytes : kSizes) {
        for (int root : {0, n / 2, n - 1}) {
          const auto memory = allocate(comm, where, bytes);
          fill(memory->data(), bytes, comm.rank() == root ? root : 100, 1);
          call(comm, how,
               {.kind = Kind::kBroadcast,
                .in = memory->data(),
                .out = memory->data(),
                .count = bytes,
                .dtype = DType::kUInt8,
                .root = root});
          CHECK_EQ(count_wrong(memory->data(), bytes, root, 1), size_t{0});
        }
      }
    });
  }
}

// Every rank contributes another number of rows, some none; after the call each overwrites its operand at once, which
// nobody may see.
TEST(all_gather) {
  for (int n = 1; n <= (kSanitized ? 3 : 8); ++n) {
    for_every_way(n, [n](Communicator& comm, Where where, How how) {
      for (size_t base : kSizes) {
        constexpr size_t kRowBytes = 3;
        auto rows_of = [&](int rank) { return base * static_cast<size_t>((rank * 2 + 1) % 4) / 3; };
        const size_t bytes = rows_of(comm.rank()) * kRowBytes;
        const auto memory = allocate(comm, where, bytes);
        fill(memory->data(), bytes, comm.rank(), 2);
        size_t all = 0;
        for (int rank = 0; rank < n; ++rank) all += rows_of(rank) * kRowBytes;
        std::vector<std::byte> room(all + 1);  // of just the result's size: it goes there
        const bool fits = base % 2 == 1;
        const auto op = call(comm, how,
                             {.kind = Kind::kAllGather,
                              .in = memory->data(),
                              .out = room.data(),
                              .count = rows_of(comm.rank()),
                              .row_elems = kRowBytes,
                              .dtype = DType::kUInt8,
                              .out_bytes = all + !fits});
        fill(memory->data(), bytes, 99, 99);
        CHECK_EQ(op->output == nullptr, fits);
        const std::byte* got = fits ? room.data() : op->output->data();
        size_t at = 0;
        for (int rank = 0; rank < n; ++rank) {
          CHECK_EQ(op->counts[rank], static_cast<int64_t>(rows_of(rank)));
          CHECK_EQ(count_wrong(got + at, rows_of(rank) * kRowBytes, rank, 2), size_t{0});
          at += rows_of(rank) * kRowBytes;
        }
        CHECK_EQ(fits ? all : op->output->bytes(), at);
      }
    });
  }
}

TEST(all_to_all) {
  for (int n = 1; n <= (kSanitized ? 3 : 8); ++n) {
    for_every_way(n, [n](Communicator& comm, Where where, How how) {
      for (size_t base : {size_t{0}, size_t{1}, size_t{700}, size_t{8192}, size_t{70001}}) {
        constexpr size_t kRowBytes = 2;
        auto rows = [&](int from, int to) { return base * static_cast<size_t>((from + 2 * to) % 3) / 2; };
        const int me = comm.rank();
        std::vector<size_t> splits;
        for (int to = 0; to < n; ++to) splits.push_back(rows(me, to));
        const size_t total = std::accumulate(splits.begin(), splits.end(), size_t{0});
        const auto memory = allocate(comm, where, total * kRowBytes);
        size_t at = 0;
        for (int to = 0; to < n; ++to) {
          fill(memory->data() + at, splits[to] * kRowBytes, me, to);
          at += splits[to] * kRowBytes;
        }
        const auto op = call(comm, how,
                             {.kind = Kind::kAllToAll,
                              .in = memory->data(),
                              .count = total,
                              .row_elems = kRowBytes,
                              .dtype = DType::kUInt8,
                              .splits = splits});
        fill(memory->data(), total * kRowBytes, 99, 99);
        at = 0;
        for (int from = 0; from < n; ++from) {
          CHECK_EQ(op->counts[from], static_cast<int64_t>(rows(from, me)));
          CHECK_EQ(count_wrong(op->output->data() + at, rows(from, me) * kRowBytes, from, me), size_t{0});
          at += rows(from, me) * kRowBytes;
        }
      }
    });
  }
}

TEST(rows_of_no_bytes) {
  for_every_way(3, [](Communicator& comm, Where, How how) {
    const auto gathered = call(comm, how, {.kind = Kind::kAllGather, .count = 2u + comm.rank(), .row_elems = 0});
    CHECK((gathered->counts == std::vector<int64_t>{2, 3, 4}));
    const auto exchanged = call(comm, how, {.kind = Kind::kAllToAll, .count = 6, .row_elems = 0, .splits = {1, 2, 3}});
    CHECK((exchanged->counts == std::vector<int64_t>(3, comm.rank() + 1)));
  });
}

namespace {

struct ReduceCase {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  size_t rows = 0;
  double prescale = 1.0;
  double postscale = 1.0;
};

double operand(int rank, size_t i, const ReduceCase& c) {
  if (c.dtype == DType::kBool) return i % (rank + 2) != 0;
  if (c.op == ReduceOp::kProduct) return (i + rank) % 2 + 1;
  return static_cast<double>((i * 7 + rank * 5) % 11);
}

// Gather and reduce, through the kernels, in rank order: the same bits are expected.
std::vector<std::byte> expected(const ReduceCase& c, size_t begin, size_t count, size_t total, int n) {
  std::vector<std::vector<std::byte>> operands;
  for (int rank = 0; rank < n; ++rank) {
    std::vector<double> values(total);
    for (size_t i = 0; i < total; ++i) values[i] = operand(rank, i, c);
    operands.push_back(encode(values, c.dtype));
    if (c.prescale != 1.0) {
      kernels::scale(operands.back().data(), operands.back().data(), total, c.dtype, c.prescale);
    }
  }
  std::vector<const void*> sources;
  for (const auto& one : operands) sources.push_back(one.data() + begin * dtype_bytes(c.dtype));
  std::vector<std::byte> result(count * dtype_bytes(c.dtype));
  kernels::reduce_n(result.data(), sources, count, c.dtype, c.op,
                    c.op == ReduceOp::kAverage ? c.postscale / n : c.postscale);
  return result;
}

void check_reduce_scatter(Communicator& comm, Where where, How how, const ReduceCase& c) {
  constexpr size_t kRowElems = 3;
  const size_t n = comm.size(), me = comm.rank(), elem = dtype_bytes(c.dtype), total = c.rows * kRowElems;
  const size_t base = c.rows / n, extra = c.rows % n;
  const size_t begin = (me * base + std::min(me, extra)) * kRowElems, count = (base + (me < extra)) * kRowElems;
  std::vector<double> values(total);
  for (size_t i = 0; i < total; ++i) values[i] = operand(comm.rank(), i, c);
  const std::vector<std::byte> bytes = encode(values, c.dtype);
  const auto in = allocate(comm, where, total * elem);
  const auto out = allocate(comm, where, count * elem);
  if (total > 0) std::memcpy(in->data(), bytes.data(), bytes.size());
  call(comm, how,
       {.kind = Kind::kReduceScatter,
        .in = in->data(),
        .out = out->data(),
        .count = c.rows,
        .row_elems = kRowElems,
        .dtype = c.dtype,
        .op = c.op,
        .prescale = c.prescale,
        .postscale = c.postscale});
  const std::vector<std::byte> want = expected(c, begin, count, total, comm.size());
  CHECK(want.empty() || std::memcmp(out->data(), want.data(), want.size()) == 0);
  CHECK(total == 0 || std::memcmp(in->data(), bytes.data(), bytes.size()) == 0);  // the operand is untouched
}

}  // namespace

TEST(reduce_scatter_every_size) {
  for (int n = 1; n <= (kSanitized ? 3 : 8); ++n) {
    for_every_way(n, [n](Communicator& comm, Where where, How how) {
      const size_t s = n;
      for (size_t rows : {size_t{0}, size_t{1}, s - 1, s, s + 1, size_t{1365}, size_t{1366}, size_t{40009}}) {
        check_reduce_scatter(comm, where, how, {.rows = rows});
      }
    });
  }
}

TEST(reduce_scatter_every_dtype_and_op) {
  for (int n : {2, 3}) {
    run_ranks(n, spinning_settings(), [](Communicator& comm) {
      for (DType dtype : kDTypes) {
        for (ReduceOp op : kOps) {
          if (!defined(dtype, op)) continue;
          for (size_t rows : {size_t{37}, size_t{kSanitized ? 3011 : 30011}}) {
            for (Where where : {Where::kPlain, Where::kMapped}) {
              check_reduce_scatter(comm, where, How::kNow, {.dtype = dtype, .op = op, .rows = rows});
              if (dtype == DType::kBool || is_bitwise(op)) continue;
              check_reduce_scatter(comm, where, How::kNow, {dtype, op, rows, 0.5, 4.0});
            }
          }
        }
      }
    });
  }
}

// Sums of 1e8, 1.25 and -1e8 in float32 depend on the order. The share of each rank has the bits of the all-reduce that
// the schedule plan::direct_all_reduce makes by messages.
TEST(reduce_scatter_equals_the_schedule) {
  constexpr size_t kCount = 48000;  // of every n a multiple
  for (int n : {2, 3, 4, 8}) {
    auto value = [](int rank, size_t i) {
      return (rank % 3 == 0 ? 1e8f : rank % 3 == 1 ? 1.25f : -1e8f) + static_cast<float>(i % 7);
    };
    std::vector<float> want(kCount);
    run_ranks(n, without_shared_memory(), [&](Communicator& comm) {
      std::vector<float> data(kCount);
      for (size_t i = 0; i < kCount; ++i) data[i] = value(comm.rank(), i);
      run(comm, {.kind = Kind::kAllReduce, .in = data.data(), .out = data.data(), .count = kCount, .algo = "direct"});
      if (comm.rank() == 0) want = data;
    });
    run_ranks(n, [&](Communicator& comm) {
      const size_t begin = kCount * comm.rank() / n, end = kCount * (comm.rank() + 1) / n;
      for (Where where : kWheres) {
        const auto memory = allocate(comm, where, kCount * sizeof(float));
        auto* data = reinterpret_cast<float*>(memory->data());
        for (size_t i = 0; i < kCount; ++i) data[i] = value(comm.rank(), i);
        std::vector<float> out(kCount / n + 1);
        run(comm, {.kind = Kind::kReduceScatter, .in = data, .out = out.data(), .count = kCount});
        CHECK(std::memcmp(out.data(), want.data() + begin, (end - begin) * sizeof(float)) == 0);
      }
    });
  }
}

// Calls of every kind one after the other, synchronous and asynchronous, with ranks that come late.
TEST(in_any_sequence) {
  for (int n : {2, 3, 5}) {
    run_ranks(n, spinning_settings(), [n](Communicator& comm) {
      const auto mapped = comm.alloc(200000);
      std::vector<std::byte> plain(200000);
      for (int i = 0; i < (kSanitized ? 80 : 200); ++i) {
        const size_t bytes = static_cast<size_t>(i * i * 5 % 200000);
        std::byte* data = i % 3 == 0 ? mapped->data() : plain.data();
        const int root = i % n;
        if (i % 40 == comm.rank()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        fill(data, bytes, comm.rank(), i);
        const Request gather{.kind = Kind::kAllGather, .in = data, .count = bytes, .row_elems = 1};
        std::shared_ptr<Operation> queued;
        if (i % 4 == 0) queued = comm.submit(gather);
        const auto gathered = call(comm, i % 2 ? How::kNow : How::kQueued, gather);
        if (queued) comm.wait(*queued);
        call(comm, How::kNow, {.kind = Kind::kBarrier});
        call(comm, How::kNow, {.kind = Kind::kBroadcast, .in = data, .out = data, .count = bytes, .root = root});
        CHECK_EQ(count_wrong(data, bytes, root, i), size_t{0});
        for (int rank = 0; rank < n; ++rank) {
          CHECK_EQ(count_wrong(gathered->output->data() + rank * bytes, bytes, rank, i), size_t{0});
          if (queued) CHECK_EQ(count_wrong(queued->output->data() + rank * bytes, bytes, rank, i), size_t{0});
        }
        float x = static_cast<float>(i);
        if (auto sum = comm.run_or_submit(Request{.kind = Kind::kAllReduce, .in = &x, .out = &x, .count = 1}))
          comm.wait(*sum);
        CHECK_EQ(x, static_cast<float>(i * n));
      }
    });
  }
}

// Both ranks in one thread: rank 0 enters and gives up looking, rank 1 takes all it came for and gives up waiting until
// rank 0 has. With an operation from the beginning, and with none.
TEST(late_in_both_phases) {
  constexpr size_t kBlock = 20'000;
  for (const Where where : kWheres) {
    for (const Kind kind : {Kind::kBroadcast, Kind::kAllGather, Kind::kAllToAll, Kind::kReduceScatter}) {
      for (const bool plainly : {false, true}) {
        auto world = two_ranks(spinning_settings());
        const bool blocks = kind == Kind::kAllToAll || kind == Kind::kReduceScatter;
        const bool gathers = kind == Kind::kAllGather || kind == Kind::kAllToAll;
        std::vector<std::shared_ptr<Memory>> in, out;
        std::vector<std::shared_ptr<Operation>> operations;
        for (const int rank : {0, 1}) {
          in.push_back(allocate(*world[rank], where, 2 * kBlock));
          out.push_back(Memory::plain(2 * kBlock));
          for (const int to : {0, 1})
            fill(in[rank]->data() + to * kBlock, kBlock, kind == Kind::kReduceScatter ? 0 : rank, to);
        }
        for (const int rank : {0, 1}) {
          const Call request{.kind = kind,
                             .in = in[rank]->data(),
                             .out = out[rank]->data(),
                             .count = blocks ? 2 * kBlock : kBlock,
                             .dtype = DType::kUInt8,
                             .op = ReduceOp::kMax,
                             .out_bytes = gathers ? 2 * kBlock : 0};
          operations.push_back(plainly ? world[rank]->run_or_submit(request)
                                       : world[rank]->run_or_submit(Request::of(request, 2)));
        }
        CHECK(operations[0] != nullptr && !operations[0]->done.load());
        const auto& late = operations[1];  // null: done, by the one barrier of what went through the slots
        if (where == Where::kMapped) CHECK(late != nullptr && !late->done.load());
        bool done = false;
        for (int i = 0; i < 10000 && !done; ++i) {
          const bool first = world[0]->wait_for(*operations[0], 1e-4);  // both are brought on
          done = (late == nullptr || world[1]->wait_for(*late, 1e-4)) && first;
        }
        CHECK(done && !operations[0]->error && (late == nullptr || !late->error));
        for (const int rank : {0, 1}) {
          const std::byte* got = out[rank]->data();
          for (const int from : {0, 1}) {
            if (gathers || from == 0)
              CHECK_EQ(count_wrong(got + from * kBlock, kBlock, from, blocks ? rank : 0), size_t{0});
          }
        }
      }
    }
  }
}

// The odd rank out calls something else: nothing is moved, everybody is told, the next call works.
TEST(mismatch_on_any_rank) {
  for (int n : {2, 4}) {
    run_ranks(n, spinning_settings(), [n](Communicator& comm) {
      const auto memory = comm.alloc(100000);
      std::byte* data = memory->data();
      const Request base{.kind = Kind::kBroadcast, .in = data, .out = data, .count = 100000, .dtype = DType::kUInt8};
      const Request others[] = {
          {.kind = Kind::kBarrier},
          {.kind = Kind::kAllGather, .in = data, .count = 100000, .dtype = DType::kUInt8},
          {.kind = Kind::kReduceScatter, .in = data, .out = data, .count = 25000},
          {.kind = Kind::kBroadcast, .in = data, .out = data, .count = 100, .dtype = DType::kUInt8},
          {.kind = Kind::kBroadcast, .in = data, .out = data, .count = 100000, .dtype = DType::kUInt8, .root = 1}};
      for (int odd = 0; odd < n; ++odd) {
        for (const Request& other : others) {
          fill(data, 100000, comm.rank(), 3);
          CHECK_THROWS(call(comm, odd % 2 ? How::kNow : How::kQueued, comm.rank() == odd ? other : base), MismatchError,
                       "rank " + std::to_string(odd) + " called");
          CHECK_EQ(count_wrong(data, 100000, comm.rank(), 3), size_t{0});
          call(comm, How::kNow, {.kind = Kind::kBarrier});
        }
      }
    });
  }
}

// A rank fails between its entry and the end of a pull from its memory: the others do not wait forever.
TEST(failure_and_timeout_end_a_pull) {
  Settings settings = spinning_settings();
  settings.timeout_s = 0.3;
  for (bool fails : {true, false}) {
    auto world = connect_threads(2, settings);
    std::vector<std::shared_ptr<Memory>> memory;
    for (auto& comm : world) memory.push_back(comm->alloc(1 << 20));
    auto request = [&](int rank) {
      return Request{.kind = Kind::kAllGather, .in = memory[rank]->data(), .count = 1 << 20, .name = "late"};
    };
    std::thread first([&] { run(*world[0], {.kind = Kind::kBarrier}); });
    run(*world[1], {.kind = Kind::kBarrier});
    first.join();
    const auto entered = world[1]->run_or_submit(request(1));  // rank 1 enters, and never looks again
    if (fails) world[1]->fail("gone fishing");
    CHECK(!entered->done.load() || entered->error);
    if (fails) {
      CHECK_THROWS(run(*world[0], request(0)), PeerError, "gone fishing");
    } else {
      CHECK_THROWS(run(*world[0], request(0)), TimeoutError, "allgather 'late'");
    }
  }
}

TEST_MAIN
