// Staged all-reduce, polled by hand: every rank in one thread, in random order, so that each gets as far ahead of the
// others as the protocol lets it. What ranks as threads rarely do happens here in every run, and a failure repeats.
#include "engine/node/staged.h"

#include <cstring>
#include <optional>
#include <random>

#include "support/check.h"
#include "transport/mapped/local.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

enum class Where { kPlain, kMapped, kMappedInPlace };

struct Sum {
  size_t count;
  double prescale;
  std::vector<Where> where;  // per rank
  std::vector<float> want = {};
};

// Depends on everything, and 1e8 makes the sum depend on the order of the ranks.
float value(int rank, size_t sum, size_t i) {
  return static_cast<float>((i * 7 + rank * 5 + sum * 3) % 11) + (rank % 3 == 0 ? 1e8f : rank % 3 == 1 ? 1.25f : -1e8f);
}

class Rank {
 public:
  Rank(Endpoint endpoint, int rank)
      : rank_(rank),
        endpoint_(std::move(endpoint)),
        board_(*endpoint_.window),
        slots_(endpoint_.window, board_, false),
        staged_(board_, slots_, job_) {
    slots_ticket_ = board_.post({.value = slots_.own_offset()});
  }
  void learn() { slots_.learn(slots_ticket_); }

  // Does one thing of the sum that is under way.
  void turn(const std::vector<Sum>& sums) {
    if (is_finished(sums)) return;
    if (!ticket_) {
      enter(sums[at_]);
    } else if (!begun_) {
      bool moved = false;
      begun_ = BoardWait(board_, *ticket_).poll(moved);
      if (begun_) staged_.begin(*ticket_);
    } else if (bool moved = false; staged_.poll(moved)) {
      check(sums[at_]);
      begun_ = false;
      ticket_.reset();
      ++at_;
    }
  }
  bool is_finished(const std::vector<Sum>& sums) const { return at_ == sums.size(); }
  Staged& staged() { return staged_; }
  size_t least_piece_bytes() const { return slots_.piece_bytes(0); }

 private:
  void enter(const Sum& sum) {
    const size_t bytes = sum.count * sizeof(float);
    const Where where = sum.where[rank_];
    const auto memory = [&] {
      return where == Where::kPlain ? Memory::plain(bytes) : Memory::mapped(endpoint_.window, bytes);
    };
    in_ = memory();
    out_ = where == Where::kMappedInPlace ? in_ : memory();
    auto* values = reinterpret_cast<float*>(in_->data());
    for (size_t i = 0; i < sum.count; ++i) values[i] = value(rank_, at_, i);
    job_ = {.in = in_->data(), .out = out_->data(), .count = sum.count, .prescale = sum.prescale};
    BoardEntry::Post post{.offset_in = Window::kUnmapped, .offset_out = Window::kUnmapped};
    if (where == Where::kPlain || sum.prescale != 1.0) {
      Staged::fill_first(board_, slots_, job_);
    } else {
      post.offset_in = endpoint_.window->offset_of(job_.in, bytes);
      post.offset_out = endpoint_.window->offset_of(job_.out, bytes);
    }
    ticket_ = board_.post(post);
  }

  void check(const Sum& sum) {
    CHECK(std::memcmp(out_->data(), sum.want.data(), sum.count * sizeof(float)) == 0);
    if (in_ == out_) return;
    const auto* in = reinterpret_cast<const float*>(in_->data());
    for (size_t i = 0; i < sum.count; ++i) CHECK_EQ(in[i], value(rank_, at_, i));
  }

  int rank_;
  Endpoint endpoint_;
  Board board_;
  Slots slots_;
  uint64_t slots_ticket_;
  size_t at_ = 0;  // the sum that is under way
  std::shared_ptr<Memory> in_, out_;
  ReduceJob job_;
  std::optional<uint64_t> ticket_;
  Staged staged_;
  bool begun_ = false;
};

std::vector<std::unique_ptr<Rank>> make_ranks(int n) {
  std::vector<Endpoint> endpoints = connect_local(n, {.arena_bytes = size_t{128} << 20});
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int r = 0; r < n; ++r) ranks.push_back(std::make_unique<Rank>(std::move(endpoints[r]), r));
  for (auto& rank : ranks) rank->learn();
  return ranks;
}

std::vector<float> in_rank_order(int n, size_t sum, size_t count, double prescale) {
  std::vector<float> sums(count, 0.0f);
  for (int rank = 0; rank < n; ++rank) {
    for (size_t i = 0; i < count; ++i) sums[i] += value(rank, sum, i) * static_cast<float>(prescale);
  }
  return sums;
}

// In bursts, so that one rank runs as far as it can before another gets a turn.
void run_in_random_order(int n, std::vector<Sum> sums, unsigned seed) {
  for (size_t i = 0; i < sums.size(); ++i) sums[i].want = in_rank_order(n, i, sums[i].count, sums[i].prescale);
  auto ranks = make_ranks(n);
  std::mt19937 random(test::seed() + seed);
  for (int finished = 0; finished < n;) {
    Rank& rank = *ranks[random() % n];
    for (unsigned turns = 1 + random() % 8; turns > 0; --turns) rank.turn(sums);
    finished = 0;
    for (auto& each : ranks) finished += each->is_finished(sums);
  }
}

}  // namespace

TEST(every_boundary) {
  for (int n : {2, 3, 4, 5, 8}) {
    const std::vector<Where> plain(n, Where::kPlain);
    const size_t piece = make_ranks(n).front()->least_piece_bytes() / sizeof(float);
    const size_t most = Slots::kMostPieceBytes / sizeof(float);
    std::vector<Sum> sums;
    for (const size_t count : {size_t{1}, size_t{15}, size_t{16}, size_t{17}, size_t{16} * n - 1, size_t{16} * n + 1,
                               piece - 1, piece, piece + 1, 2 * piece - 17, 2 * piece, 2 * piece + 1, 3 * piece + 5}) {
      sums.push_back({count, 1.0, plain, {}});
    }
    if (n <= 4) {
      for (const size_t pieces : {4, 5, 7}) sums.push_back({pieces * most - 3, 1.0, plain, {}});
    }
    run_in_random_order(n, sums, n);
  }
}

TEST(any_memory_any_order) {
  for (int n : {2, 3, 4}) {
    for (unsigned seed = 0; seed < 4; ++seed) {
      std::mt19937 random(test::seed() + seed + 100 * n);
      std::vector<Sum> sums;
      for (int i = 0; i < 10; ++i) {
        Sum sum{1 + random() % (i % 3 == 0 ? 400000 : 3000), i % 4 == 3 ? 0.5 : 1.0, {}, {}};
        for (int rank = 0; rank < n; ++rank) sum.where.push_back(static_cast<Where>(random() % 3));
        sums.push_back(sum);
      }
      run_in_random_order(n, sums, seed);
    }
  }
}

// A peer that stops between two pieces is named, by all others, for as long as it does not move.
TEST(waits_name_who_stopped_in_the_middle) {
  auto ranks = make_ranks(3);
  const size_t piece = Slots::kMostPieceBytes / sizeof(float);
  const std::vector<Sum> sums{{5 * piece, 1.0, std::vector<Where>(3, Where::kPlain), {}}};
  for (int turn = 0; turn < 2; ++turn) {
    for (auto& rank : ranks) rank->turn(sums);  // entered; then begun
  }
  for (int turn = 0; turn < 3; ++turn) {
    for (int r : {0, 2}) ranks[r]->turn(sums);
  }
  for (int r : {0, 2}) {
    bool moved = false;
    CHECK(!ranks[r]->staged().poll(moved));
    CHECK(!moved);
    std::vector<int> missing;
    ranks[r]->staged().waiting_for(missing);
    CHECK(missing == std::vector<int>{1});
  }
  ranks[1]->turn(sums);
  bool moved = false;
  ranks[0]->staged().poll(moved);
  CHECK(moved);
}

TEST_MAIN
