// All-reduce on the caller's own thread: every form around its thresholds, peers that are late in every phase, and no
// allocation.
#include "engine/node/node_all_reduce.h"

#include <sched.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <optional>
#include <random>

#include "base/error.h"
#include "rank_threads.h"
#include "support/check.h"
#include "values.h"

namespace {
thread_local size_t allocations = 0;
}
// Not inlined: GCC would take new and free() for a mismatched pair.
[[gnu::noinline]] void* operator new(size_t bytes) {
  ++allocations;
  if (void* block = std::malloc(bytes > 0 ? bytes : 1)) return block;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* block) noexcept { std::free(block); }
[[gnu::noinline]] void operator delete(void* block, size_t) noexcept { std::free(block); }

using namespace dcoll;
using namespace dcoll::test;

namespace {

// So that calls begin on the caller's thread however few cores there are.
Settings inline_settings() {
  Settings settings = test_settings();
  settings.spin_us = 100;
  return settings;
}

float operand(int rank, size_t i) { return static_cast<float>((i * 7 + rank * 5) % 11); }

float expected(size_t i, int n, double prescale) {
  float value = 0;
  for (int rank = 0; rank < n; ++rank) value += static_cast<float>(prescale) * operand(rank, i);
  return value;
}

// One rank's operand and result, filled.
struct Buffers {
  Buffers(Communicator& comm, size_t count_in, bool mapped, bool in_place) : count(count_in), rank(comm.rank()) {
    const size_t bytes = count * sizeof(float);
    in = mapped ? comm.alloc(bytes) : Memory::plain(bytes);
    out = in_place ? in : mapped ? comm.alloc(bytes) : Memory::plain(bytes);
    for (size_t i = 0; i < count; ++i) data(in)[i] = operand(rank, i);
  }
  static float* data(const std::shared_ptr<Memory>& memory) { return reinterpret_cast<float*>(memory->data()); }
  Call call(double prescale = 1.0) const {
    return {.in = in->data(), .out = out->data(), .count = count, .prescale = prescale};
  }
  void check_sum(int n, double prescale = 1.0) const {
    for (size_t i = 0; i < count; ++i) CHECK_EQ(data(out)[i], expected(i, n, prescale));
    for (size_t i = 0; in != out && i < count; ++i) CHECK_EQ(data(in)[i], operand(rank, i));
  }
  void check_untouched() const {
    for (size_t i = 0; i < count; ++i) CHECK_EQ(data(in)[i], operand(rank, i));
    for (size_t i = 0; in != out && i < count; ++i) CHECK_EQ(data(out)[i], 0.0f);
  }
  size_t count;
  int rank;
  std::shared_ptr<Memory> in, out;
};

void run_now(Communicator& comm, const Call& call) {
  if (const auto operation = comm.run_or_submit(call)) comm.wait(*operation);
}

constexpr size_t kThresholds[] = {Board::kInlineBytes / 4, NodeAllReduce::kInPlaceBytes / 4, Slots::kBytes / 4};

// Ranks that are connected meanwhile share a core, however many there are.
class OneCore {
 public:
  OneCore() {
    CHECK_EQ(sched_getaffinity(0, sizeof before_, &before_), 0);
    int core = 0;
    while (!CPU_ISSET(core, &before_)) ++core;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    CHECK_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  }
  ~OneCore() { sched_setaffinity(0, sizeof before_, &before_); }
  OneCore(const OneCore&) = delete;
  OneCore& operator=(const OneCore&) = delete;

 private:
  cpu_set_t before_;
};

enum class Form { kInline, kSlot, kSlotLarge, kTwoShot, kScaled, kMixed, kStaged, kStagedMixed };
constexpr Form kForms[] = {Form::kInline, Form::kSlot,  Form::kSlotLarge, Form::kTwoShot,
                           Form::kScaled, Form::kMixed, Form::kStaged,    Form::kStagedMixed};

size_t count_of(Form form) {
  switch (form) {
    case Form::kInline:
      return 3;
    case Form::kSlot:
      return NodeAllReduce::kInPlaceBytes / 4;
    case Form::kSlotLarge:
    case Form::kMixed:
      return Slots::kBytes / 4;
    case Form::kTwoShot:
    case Form::kScaled:
      return 100003;
    case Form::kStaged:
    case Form::kStagedMixed:
      return 100001;  // several pieces
  }
  return 0;
}

std::vector<std::shared_ptr<Communicator>> two_ranks_for(Form form, const Settings& settings) {
  std::optional<OneCore> narrow;
  if (form == Form::kSlotLarge || form == Form::kMixed) narrow.emplace();
  return two_ranks(settings);
}

bool mapped_in(Form form, int rank) {
  const bool mixed = form == Form::kMixed || form == Form::kStagedMixed;
  return form == Form::kTwoShot || form == Form::kScaled || (mixed && rank == 0);
}

double prescale_of(Form form) { return form == Form::kScaled ? 2.0 : 1.0; }

void around_every_threshold(int n) {
  run_ranks(n, inline_settings(), [n](Communicator& comm) {
    for (const size_t threshold : kThresholds) {
      for (const size_t count : {threshold - 1, threshold, threshold + 1}) {
        for (const int mapped : {0, 1, 2}) {  // nobody's memory, everybody's, that of every other rank
          for (const double prescale : {1.0, 2.0}) {
            Buffers buffers(comm, count, mapped == 1 || (mapped == 2 && comm.rank() % 2 == 0), count % 2 == 0);
            run_now(comm, buffers.call(prescale));
            buffers.check_sum(n, prescale);
          }
        }
      }
    }
  });
}

}  // namespace

TEST(around_every_threshold) {
  for (int n : {2, 3, 5}) around_every_threshold(n);
  const OneCore narrow;
  around_every_threshold(2);
}

// Rank 1 arrives when rank 0 has given up polling, and itself gives up in the phase after. Then each looks now and
// then, so that every later phase begins with a late peer, too.
TEST(late_in_every_phase) {
  for (const Form form : kForms) {
    auto world = two_ranks_for(form, inline_settings());
    const double prescale = prescale_of(form);
    for (int repeat = 0; repeat < 3; ++repeat) {
      std::vector<Buffers> buffers;
      for (int rank : {0, 1}) buffers.emplace_back(*world[rank], count_of(form), mapped_in(form, rank), repeat % 2);
      const auto first = world[0]->run_or_submit(buffers[0].call(prescale));
      CHECK(first != nullptr && !first->done.load());
      const auto second = world[1]->run_or_submit(buffers[1].call(prescale));
      const bool one_barrier = form == Form::kInline || form == Form::kSlot || form == Form::kSlotLarge;
      CHECK_EQ(second == nullptr, one_barrier);
      bool done = false;
      for (int i = 0; i < 10000 && !done; ++i) {
        done = world[0]->wait_for(*first, 1e-4);
        if (second != nullptr) done &= world[1]->wait_for(*second, 1e-4);
      }
      CHECK(done && !first->error && (second == nullptr || !second->error));
      for (int rank : {0, 1}) buffers[rank].check_sum(2, prescale);
    }
  }
}

TEST(timeout_in_every_phase) {
  Settings settings = inline_settings();
  settings.timeout_s = 0.05;
  for (const Form form : kForms) {
    for (const int reached : {0, 1}) {  // barriers that rank 0 takes part in before it looks away
      auto world = two_ranks_for(form, settings);
      Buffers mine(*world[1], count_of(form), mapped_in(form, 1), true);
      Buffers theirs(*world[0], count_of(form), mapped_in(form, 0), true);
      std::shared_ptr<Operation> entered;
      if (reached > 0) entered = world[0]->run_or_submit(theirs.call(prescale_of(form)));
      const auto operation = world[1]->run_or_submit(mine.call(prescale_of(form)));
      if (operation == nullptr) continue;  // one barrier was all it needed
      CHECK_THROWS(world[1]->wait(*operation), TimeoutError, "waiting for rank 0 of 2");
      if (entered == nullptr) continue;
      if (form == Form::kTwoShot || form == Form::kMixed) {  // rank 1 did all its part before it failed
        world[0]->wait(*entered);
        theirs.check_sum(2);
      } else {
        CHECK_THROWS(world[0]->wait(*entered), TimeoutError, "waiting for rank 0 of 2");
      }
    }
  }
}

TEST(mismatch_in_every_form) {
  for (int n : {2, 3}) {
    run_ranks(n, inline_settings(), [n](Communicator& comm) {
      for (const Form form : kForms) {
        const bool odd = comm.rank() == 1;
        Buffers buffers(comm, count_of(form) - odd, mapped_in(form, comm.rank()), false);
        CHECK_THROWS(run_now(comm, buffers.call()), MismatchError, "rank 1 called allreduce");
        buffers.check_untouched();
        Call named = buffers.call();
        named.count = count_of(form) - 1;
        named.name = odd ? "a" : "b";
        CHECK_THROWS(run_now(comm, named), MismatchError, "rank 1 called allreduce 'a'");
        buffers.check_untouched();
        Buffers again(comm, count_of(form), mapped_in(form, comm.rank()), true);
        run_now(comm, again.call());
        again.check_sum(n);
      }
    });
  }
}

// What one rank does at once another queues, and the memory is now mapped and now not.
TEST(any_path_on_any_rank) {
  for (int n : {2, 3, 4}) {
    run_ranks(n, inline_settings(), [n](Communicator& comm) {
      std::mt19937 common(test::seed() + 7), own(test::seed() + comm.rank());
      for (int i = 0; i < 300; ++i) {
        const size_t count = kThresholds[common() % 3] * (1 + common() % 2) - 2 + common() % 5;
        const bool same = common() % 2, all_mapped = common() % 2;
        Buffers buffers(comm, count, same ? all_mapped : own() % 2, own() % 2);
        if (own() % 3 == 0) {
          run(comm, Request::of(buffers.call(), comm.size()));
        } else {
          run_now(comm, buffers.call());
        }
        buffers.check_sum(n);
      }
    });
  }
}

TEST(nothing_is_allocated) {
  std::atomic<size_t> looked_at[std::size(kForms)] = {};
  run_ranks(2, inline_settings(), [&](Communicator& comm) {
    for (const Form form : kForms) {
      Buffers buffers(comm, count_of(form), mapped_in(form, comm.rank()), false);
      for (int i = 0; i < 200; ++i) {
        const size_t before = allocations;
        const auto operation = comm.run_or_submit(buffers.call(prescale_of(form)));
        if (operation == nullptr && i > 0) {
          CHECK_EQ(allocations, before);
          ++looked_at[static_cast<size_t>(form)];
        }
        if (operation != nullptr) comm.wait(*operation);
      }
      buffers.check_sum(2, prescale_of(form));
    }
  });
  // Of one barrier: whoever comes last is done at once.
  for (const Form form : {Form::kInline, Form::kSlot}) CHECK(looked_at[static_cast<size_t>(form)] > 0);
}

TEST(arguments_are_checked) {
  run_ranks(2, inline_settings(), [](Communicator& comm) {
    Buffers buffers(comm, 4, false, true);
    Call call = buffers.call(0.5);
    call.dtype = DType::kBool;
    CHECK_THROWS(comm.run_or_submit(call), ArgumentError, "factors need a number type");
    call = buffers.call();
    call.dtype = DType::kBool;
    call.op = ReduceOp::kAverage;
    CHECK_THROWS(comm.run_or_submit(call), ArgumentError, "average of bool");
    run_now(comm, buffers.call());
    buffers.check_sum(2);
  });
}

// A queued and an immediate call of the same thing agree, and every argument counts.
TEST(fingerprints) {
  float x = 0;
  const Call base{.in = &x, .out = &x, .count = 5};
  const int64_t wide[] = {1, 5}, tall[] = {5, 1}, flat[] = {5};
  std::vector<Call> calls(11, base);
  calls[1].count = 6;
  calls[2].dtype = DType::kInt32;
  calls[3].op = ReduceOp::kMax;
  calls[4].prescale = 2;
  calls[5].postscale = 2;
  calls[6].algo = "direct";
  calls[7].name = "direct";
  calls[8].name = "grad";
  calls[9].dims = wide;
  calls[10].dims = tall;
  for (size_t a = 0; a < calls.size(); ++a) {
    CHECK_EQ(calls[a].fingerprint(), Request::of(calls[a], 2).fingerprint());
    for (size_t b = 0; b < a; ++b) CHECK(calls[a].fingerprint() != calls[b].fingerprint());
  }
  calls[0].dims = flat;
  CHECK_EQ(calls[0].fingerprint(), base.fingerprint());
}

TEST_MAIN
