// Operands that lie in several tensors: packed into mapped memory but for the slice that no other rank reads.
#include <chrono>
#include <cmath>
#include <limits>
#include <thread>
#include <vector>

#include "base/error.h"
#include "engine/communicator/communicator.h"
#include "engine/node/two_shot.h"
#include "kernels/pack.h"
#include "rank_threads.h"
#include "support/check.h"
#include "values.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

float operand(int rank, size_t i) { return static_cast<float>((i * 7 + rank * 5) % 11); }

Settings inline_settings() {
  Settings settings = test_settings();
  settings.spin_us = 100;
  return settings;
}

// The tensors of a rank, empty ones among them, packed as a group packs them; what need not be packed is NaN.
struct Tensors {
  Tensors(Communicator& comm, size_t count_in, double prescale, bool into_tensors = false)
      : count(count_in), scale(prescale), into(into_tensors) {
    const size_t bytes = count * sizeof(float);
    flat = comm.scratch(bytes);
    for (size_t i = 0; i < count; ++i) data()[i] = std::numeric_limits<float>::quiet_NaN();
    values.resize(count);
    for (size_t i = 0; i < count; ++i) values[i] = operand(comm.rank(), i);
    const size_t ends[] = {0, 1, count / 3, count / 3, count / 2 + 1, count, count};
    size_t begin = 0;
    for (const size_t end : ends) {
      segments.push_back({values.data() + begin, begin * sizeof(float), (end - begin) * sizeof(float)});
      begin = end;
    }
    own = own_slice(comm.as_made(), call());
    kernels::pack_range(flat->data(), segments, 0, own.begin);
    kernels::pack_range(flat->data(), segments, own.end, bytes);
    left_out = own.size();
  }
  float* data() const { return reinterpret_cast<float*>(flat->data()); }
  Call call() const {
    return {.in = flat->data(),
            .out = flat->data(),
            .count = count,
            .prescale = scale,
            .packed = true,
            .tensors = left_out > 0 ? std::span<const kernels::Segment>(segments) : std::span<const kernels::Segment>(),
            .into_tensors = into};
  }
  // What is in the tensors after the call, and with `into` all of the sum after this.
  void unpack_others() const {
    kernels::unpack_range(segments, flat->data(), 0, own.begin);
    kernels::unpack_range(segments, flat->data(), own.end, count * sizeof(float));
  }
  void check_sum(int n) const { check_sum(data(), n); }
  void check_sum(const float* result, int n) const {
    for (size_t i = 0; i < count; ++i) {
      float sum = 0;
      for (int rank = 0; rank < n; ++rank) sum += static_cast<float>(scale) * operand(rank, i);
      CHECK_EQ(result[i], sum);
    }
  }

  size_t count;
  double scale;
  bool into;
  Span own;
  std::shared_ptr<Memory> flat;
  std::vector<float> values;
  std::vector<kernels::Segment> segments;
  size_t left_out = 0;
};

void run_now(Communicator& comm, const Call& call) {
  if (const auto operation = comm.run_or_submit(call)) comm.wait(*operation);
}

}  // namespace

TEST(every_size) {
  constexpr size_t kLeast = NodeAllReduce::kInPlaceBytes / 4;
  for (int n : {1, 2, 3, 5, 8}) {
    run_ranks(n, inline_settings(), [n](Communicator& comm) {
      for (const size_t count : {size_t{1}, kLeast, kLeast + 1, size_t{4097}, size_t{100003}, size_t{300001}}) {
        for (const double prescale : {1.0, 2.0}) {
          const Tensors mine(comm, count, prescale);
          CHECK_EQ(mine.left_out > 0, n > 1 && count > kLeast && prescale == 1.0);
          run_now(comm, mine.call());
          mine.check_sum(n);
        }
      }
    });
  }
}

// The slice that this rank reduces goes into its tensors and nowhere else, the others stay where they were packed.
TEST(own_slice_into_tensors) {
  for (int n : {2, 3, 5, 8}) {
    run_ranks(n, inline_settings(), [n](Communicator& comm) {
      for (const size_t count : {NodeAllReduce::kInPlaceBytes / 4 + 1, size_t{4097}, size_t{300001}}) {
        const Tensors mine(comm, count, 1.0, /*into_tensors=*/true);
        CHECK(mine.left_out > 0);
        run_now(comm, mine.call());
        for (size_t i = 0; i < count; ++i) {
          const bool own = i * sizeof(float) >= mine.own.begin && i * sizeof(float) < mine.own.end;
          CHECK_EQ(std::isnan(mine.data()[i]), own);
          if (!own) CHECK_EQ(mine.values[i], operand(comm.rank(), i));
        }
        mine.unpack_others();
        mine.check_sum(mine.values.data(), n);
      }
    });
  }
}

// Memory that peers cannot read is packed as a whole, and is never met by the other kind: a call that is not of packed
// tensors differs, though its name and size are equal.
TEST(only_of_packed_and_mapped_memory) {
  run_ranks(3, inline_settings(), [](Communicator& comm) {
    for (const size_t count : {size_t{300}, size_t{2000}, size_t{100003}}) {
      const Tensors mine(comm, count, 1.0);
      const auto plain = Memory::plain(count * sizeof(float));
      Call call = mine.call();
      call.in = call.out = plain->data();
      const Span none = own_slice(comm.as_made(), call);
      CHECK_EQ(none.size(), size_t{0});
      const bool other = comm.rank() == 1;
      call.packed = false;
      call.tensors = {};
      CHECK_THROWS(run_now(comm, other ? call : mine.call()), MismatchError, "");
      run_now(comm, mine.call());
      mine.check_sum(3);
    }
  });
}

// Rank 1 arrives when rank 0 has given up polling: the coroutine goes on with the tensors.
TEST(late_peer) {
  run_ranks(2, inline_settings(), [](Communicator& comm) {
    for (int repeat = 0; repeat < 4; ++repeat) {
      const bool into = repeat >= 2;
      const Tensors mine(comm, 100003, 1.0, into);
      if (comm.rank() == repeat % 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      run_now(comm, mine.call());
      mine.unpack_others();
      mine.check_sum(into ? mine.values.data() : mine.data(), 2);
    }
  });
}

TEST_MAIN
