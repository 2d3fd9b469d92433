// The other collectives: broadcast, all-gather, reduce-scatter, all-to-all, barrier, with ragged and empty parts.
#include <atomic>
#include <numeric>

#include "base/error.h"
#include "rank_threads.h"
#include "support/check.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

std::vector<int32_t> as_ints(const Memory& memory) {
  std::vector<int32_t> values(memory.bytes() / 4);
  if (!values.empty()) std::memcpy(values.data(), memory.data(), memory.bytes());
  return values;
}

// With shared memory and by messages alone.
void for_both_worlds(int n, const std::function<void(Communicator&)>& body) {
  run_ranks(n, body);
  run_ranks(n, without_shared_memory(), body);
}

}  // namespace

TEST(broadcast_from_every_root) {
  for (int n = 1; n <= 8; ++n) {
    for_both_worlds(n, [n](Communicator& comm) {
      for (int root = 0; root < n; ++root) {
        for (size_t count : {size_t{0}, size_t{1}, size_t{1001}, size_t{70001}}) {
          std::vector<int32_t> data(count, -1);
          if (comm.rank() == root) std::iota(data.begin(), data.end(), root);
          run(comm, {.kind = Kind::kBroadcast,
                     .in = data.data(),
                     .out = data.data(),
                     .count = count * 4,
                     .dtype = DType::kInt32,
                     .root = root});
          for (size_t i = 0; i < count; ++i) CHECK_EQ(data[i], static_cast<int32_t>(i) + root);
        }
      }
    });
  }
}

TEST(ragged_all_gather) {
  for (int n = 1; n <= 8; ++n) {
    for_both_worlds(n, [](Communicator& comm) {
      for (size_t scale : {size_t{0}, size_t{1}, size_t{5000}}) {
        auto rows_of = [&](int rank) { return static_cast<size_t>((rank * 2) % 5) * scale; };  // some have none
        constexpr size_t kRowElems = 3;
        const std::vector<int32_t> mine(rows_of(comm.rank()) * kRowElems, comm.rank());
        const auto op = run(comm, {.kind = Kind::kAllGather,
                                   .in = mine.data(),
                                   .count = rows_of(comm.rank()),
                                   .row_elems = kRowElems * 4,
                                   .dtype = DType::kInt32});
        std::vector<int32_t> want;
        for (int rank = 0; rank < comm.size(); ++rank) {
          CHECK_EQ(op->counts[rank], static_cast<int64_t>(rows_of(rank)));
          want.insert(want.end(), rows_of(rank) * kRowElems, rank);
        }
        CHECK(as_ints(*op->output) == want);
      }
    });
  }
}

TEST(reduce_scatter_any_rows) {
  for (int n = 1; n <= 8; ++n) {
    for_both_worlds(n, [n](Communicator& comm) {
      for (size_t rows :
           {size_t{0}, size_t{1}, static_cast<size_t>(n), static_cast<size_t>(2 * n + 1), size_t{20003}}) {
        constexpr size_t kRowElems = 2;
        std::vector<int32_t> in(rows * kRowElems);
        for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<int32_t>(i) + comm.rank();
        const size_t base = rows / n, extra = rows % n, me = comm.rank();
        const size_t begin = me * base + std::min(me, extra), mine = base + (me < extra);
        std::vector<int32_t> out(mine * kRowElems, -1);
        run(comm, {.kind = Kind::kReduceScatter,
                   .in = in.data(),
                   .out = out.data(),
                   .count = rows,
                   .row_elems = kRowElems,
                   .dtype = DType::kInt32});
        for (size_t i = 0; i < out.size(); ++i) {
          CHECK_EQ(out[i], static_cast<int32_t>(n * (begin * kRowElems + i) + n * (n - 1) / 2));
        }
      }
    });
  }
}

TEST(all_to_all_with_splits) {
  for (int n = 1; n <= 8; ++n) {
    for_both_worlds(n, [n](Communicator& comm) {
      for (size_t scale : {size_t{1}, size_t{6000}}) {
        auto rows = [&](int from, int to) { return static_cast<size_t>((from + 2 * to) % 3) * scale; };  // some zero
        std::vector<size_t> splits;
        std::vector<int32_t> in;
        for (int to = 0; to < n; ++to) {
          splits.push_back(rows(comm.rank(), to));
          in.insert(in.end(), splits.back(), comm.rank() * 100 + to);
        }
        const size_t total = in.size();
        const auto op = run(comm, {.kind = Kind::kAllToAll,
                                   .in = in.data(),
                                   .count = total,
                                   .row_elems = 4,
                                   .dtype = DType::kInt32,
                                   .splits = splits});
        std::vector<int32_t> want;
        for (int from = 0; from < n; ++from) want.insert(want.end(), rows(from, comm.rank()), from * 100 + comm.rank());
        CHECK(as_ints(*op->output) == want);
      }
    });
  }
}

TEST(barrier_holds_everyone) {
  for (int n : {2, 4, 7}) {
    std::atomic<int> entered{0};
    run_ranks(n, [&, n](Communicator& comm) {
      for (int round = 1; round <= 20; ++round) {
        entered.fetch_add(1);
        run(comm, {.kind = Kind::kBarrier});
        CHECK(entered.load() >= round * n);
        run(comm, {.kind = Kind::kBarrier});
      }
    });
  }
}

// Operations started without waiting run in order, in the background, and are done without anybody's wait.
TEST(asynchronous_in_order) {
  for (int n : {1, 2, 3, 5}) {
    run_ranks(n, [n](Communicator& comm) {
      constexpr int kMany = 50;
      std::vector<std::vector<float>> data(kMany);
      std::vector<std::shared_ptr<Operation>> operations;
      for (int i = 0; i < kMany; ++i) {
        data[i].assign(1 + i * 371 % 9000, static_cast<float>(comm.rank() + i));
        operations.push_back(comm.submit(
            {.kind = Kind::kAllReduce, .in = data[i].data(), .out = data[i].data(), .count = data[i].size()}));
      }
      while (!operations.back()->done.load()) std::this_thread::yield();  // no wait(): the background thread does it
      for (int i = 0; i < kMany; ++i) {
        CHECK(operations[i]->done.load());
        for (const float v : data[i]) CHECK_EQ(v, static_cast<float>(n * i + n * (n - 1) / 2));
      }
    });
  }
}

TEST_MAIN
