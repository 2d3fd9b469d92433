// Random collectives in flight, ranks as threads, every element checked: what tests/stress does between processes, here
// also under ThreadSanitizer. All ranks draw the same sequence; where operands lie, when a rank pauses and what it
// waits for first differ.
#include <chrono>
#include <deque>
#include <random>

#include "base/error.h"
#include "rank_threads.h"
#include "support/check.h"
#include "values.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

constexpr size_t kMaxInFlight = 5;

// Element i of rank `rank`'s operand of call `call`; sums over 8 ranks stay within every dtype.
double element(int rank, int call, size_t i) {
  return static_cast<double>((i * 7 + static_cast<size_t>(rank) * 3 + static_cast<size_t>(call)) % 11) - 5;
}

std::vector<double> elements(int rank, int call, size_t begin, size_t count) {
  std::vector<double> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = element(rank, call, begin + i);
  return values;
}

std::vector<double> reduced(int size, int call, ReduceOp op, size_t begin, size_t count) {
  std::vector<double> result = elements(0, call, begin, count);
  for (int rank = 1; rank < size; ++rank) {
    for (size_t i = 0; i < count; ++i) {
      const double x = element(rank, call, begin + i);
      result[i] = op == ReduceOp::kSum ? result[i] + x : std::max(result[i], x);
    }
  }
  return result;
}

struct InFlight {
  std::shared_ptr<Operation> operation;
  std::shared_ptr<Memory> in, out;
  std::vector<double> expected;  // in `out`, or in the operation's own output
  DType dtype;
  bool mismatched = false;
};

class Rank {
 public:
  Rank(Communicator& comm, uint32_t seed) : comm_(comm), shared_(seed), own_(seed * 64 + comm.rank()) {}

  void run(std::chrono::milliseconds duration) {
    const auto end = std::chrono::steady_clock::now() + duration;
    for (;;) {
      for (int i = 0; i < 20; ++i) step();
      while (!in_flight_.empty()) finish_one();
      // Rank 0's clock ends it for all.
      double late = comm_.rank() == 0 && std::chrono::steady_clock::now() >= end;
      test::run(comm_, {.kind = Kind::kBroadcast, .in = &late, .out = &late, .count = sizeof late});
      if (late != 0) return;
    }
  }

 private:
  size_t draw(std::mt19937& dice, size_t below) { return dice() % below; }

  size_t draw_count() {
    const size_t edges[] = {4096, 16384, 65536};  // elements of 4 bytes: up to 256 KiB
    switch (draw(shared_, 4)) {
      case 0:
        return draw(shared_, 20);
      case 1:
        return edges[draw(shared_, 3)] + draw(shared_, 3) - 1;
      case 2:
        return draw(shared_, 3000);
      default:
        return draw(shared_, 60000);
    }
  }

  std::shared_ptr<Memory> memory(size_t bytes) { return draw(own_, 2) ? comm_.alloc(bytes) : Memory::plain(bytes); }

  void step() {
    if (draw(own_, 8) == 0) std::this_thread::sleep_for(std::chrono::microseconds(draw(own_, 500)));
    start();
    while (!in_flight_.empty() && (in_flight_.size() > kMaxInFlight || draw(own_, 3) == 0)) finish_one();
    ++call_;
  }

  void start() {
    const DType dtypes[] = {DType::kFloat32, DType::kFloat16, DType::kInt32};
    const DType dtype = dtypes[draw(shared_, 3)];
    const size_t elem = dtype_bytes(dtype), kind = draw(shared_, 10), count = draw_count();
    const int size = comm_.size(), root = static_cast<int>(draw(shared_, size));
    const auto length = [&](int rank) { return count / (1 + (rank + root) % 3); };  // ragged
    const size_t mine = kind == 6 || kind == 7 ? length(comm_.rank()) : count;
    const std::vector<std::byte> bytes = encode(elements(comm_.rank(), call_, 0, mine), dtype);
    InFlight f{nullptr, memory(bytes.size()), nullptr, {}, dtype};
    if (!bytes.empty()) std::memcpy(f.in->data(), bytes.data(), bytes.size());
    Request request{.kind = Kind::kAllReduce, .in = f.in->data(), .out = f.in->data(), .count = count, .dtype = dtype};
    request.op = draw(shared_, 2) ? ReduceOp::kSum : ReduceOp::kMax;
    f.out = f.in;
    switch (kind) {
      case 4: {
        request.kind = Kind::kBroadcast;
        request.root = root;
        request.count = count * elem;
        f.expected = elements(root, call_, 0, count);
        break;
      }
      case 5: {
        request.kind = Kind::kReduceScatter;
        request.row_elems = 1;
        const size_t share = count / size, more = count % size, rank = comm_.rank();
        const size_t begin = share * rank + std::min(rank, more), rows = share + (rank < more);
        f.out = memory(rows * elem);
        request.out = f.out->data();
        f.expected = reduced(size, call_, request.op, begin, rows);
        break;
      }
      case 6:
      case 7: {
        request.kind = Kind::kAllGather;
        request.count = mine;
        request.row_elems = elem;
        request.out = nullptr;
        f.out = nullptr;
        for (int r = 0; r < size; ++r) {
          const auto piece = elements(r, call_, 0, length(r));
          f.expected.insert(f.expected.end(), piece.begin(), piece.end());
        }
        break;
      }
      case 8: {
        request.kind = Kind::kAllToAll;
        request.row_elems = elem;
        request.out = nullptr;
        f.out = nullptr;
        request.splits.assign(size, count / size);
        request.splits.back() += count % size;
        for (int r = 0; r < size; ++r) {
          const auto piece = elements(r, call_, count / size * comm_.rank(), request.splits[comm_.rank()]);
          f.expected.insert(f.expected.end(), piece.begin(), piece.end());
        }
        break;
      }
      default: {
        f.mismatched = kind == 9 && size > 1;
        if (f.mismatched && comm_.rank() == root) request.name = "another";
        f.expected =
            f.mismatched ? elements(comm_.rank(), call_, 0, count) : reduced(size, call_, request.op, 0, count);
      }
    }
    f.operation = comm_.submit(std::move(request),
                               draw(own_, 2) ? Communicator::Start::kInBackground : Communicator::Start::kByWaiter);
    in_flight_.push_back(std::move(f));
  }

  void finish_one() {
    const size_t which = draw(own_, in_flight_.size());
    const InFlight f = std::move(in_flight_[which]);
    in_flight_.erase(in_flight_.begin() + static_cast<std::ptrdiff_t>(which));
    if (f.mismatched) {
      CHECK_THROWS(comm_.wait(*f.operation), MismatchError, "different collectives");
    } else {
      comm_.wait(*f.operation);
    }
    const Memory& out = f.out != nullptr ? *f.out : *f.operation->output;
    CHECK(out.bytes() == f.expected.size() * dtype_bytes(f.dtype));
    const std::vector<std::byte> expected = encode(f.expected, f.dtype);
    CHECK(expected.empty() || std::memcmp(out.data(), expected.data(), expected.size()) == 0);
  }

  Communicator& comm_;
  std::mt19937 shared_, own_;
  std::deque<InFlight> in_flight_;
  int call_ = 0;
};

void run_for(int size, const Settings& settings, std::chrono::milliseconds duration) {
  run_ranks(size, settings, [&](Communicator& comm) { Rank(comm, test::seed() + size).run(duration); });
}

}  // namespace

TEST(random_collectives_over_shared_memory) {
  for (int size = 2; size <= 8; ++size) run_for(size, test_settings(), std::chrono::milliseconds(700));
}

TEST(random_collectives_by_messages) {
  for (const int size : {2, 3, 7}) run_for(size, without_shared_memory(), std::chrono::milliseconds(500));
}

TEST_MAIN
