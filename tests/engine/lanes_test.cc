// The executor with several slices of a channel under way at once, in every all-reduce.
#include <thread>

#include "engine/schedule/executor.h"
#include "plan/algorithms.h"
#include "support/check.h"
#include "support/threads.h"
#include "transport/mapped/local.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

constexpr size_t kSliceBytes = 64;

void finish(Transport& transport, Executor& executor) {
  const auto hang = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (bool moved = false; !executor.poll(moved);) {
    CHECK(std::chrono::steady_clock::now() < hang);
    transport.progress();
    std::this_thread::yield();
  }
}

int32_t operand(int rank, size_t i) { return static_cast<int32_t>(i * 7 + static_cast<size_t>(rank) * 1000); }

void check_all_reduce(const plan::Algorithm& algorithm, int n, size_t lanes, size_t count, bool in_place, int slots) {
  auto ends = connect_local(n, {.arena_bytes = 1 << 16, .slot_bytes = kSliceBytes, .slots = slots});
  on_threads(n, [&](int rank) {
    Transport& transport = *ends[static_cast<size_t>(rank)].transport;
    const auto schedule = std::make_shared<const plan::Schedule>(
        algorithm.build(static_cast<uint32_t>(n), static_cast<uint32_t>(rank), 0));
    std::vector<int32_t> in(count), fresh(count);
    for (size_t i = 0; i < count; ++i) in[i] = operand(rank, i);
    std::vector<int32_t>& out = in_place ? in : fresh;
    // Twice, so that what the first run leaves in the FIFOs would be noticed.
    for (int run = 1; run <= 2; ++run) {
      Executor executor(transport, schedule,
                        {.input = reinterpret_cast<const std::byte*>(in.data()),
                         .output = reinterpret_cast<std::byte*>(out.data()),
                         .input_layout = Layout::even(count, schedule->input_chunks),
                         .output_layout = Layout::even(count, schedule->output_chunks),
                         .dtype = DType::kInt32},
                        kSliceBytes, lanes);
      finish(transport, executor);
      for (size_t i = 0; i < count; ++i) {
        int32_t want = 0;
        for (int peer = 0; peer < n; ++peer) want += operand(peer, i);
        CHECK_EQ(out[i], in_place && run == 2 ? n * want : want);
      }
    }
  });
}

}  // namespace

TEST(lanes_share_nothing) {
  for (const plan::Algorithm& algorithm : plan::algorithms()) {
    if (algorithm.collective != plan::Collective::kAllReduce) continue;
    for (const int n : {1, 2, 3, 4, 7}) {
      for (const size_t lanes : {1, 2, 3, 8}) {
        // A slice has 16 elements: fewer rounds than lanes, as many, and many more, with ragged ends.
        for (const size_t count : {size_t{0}, size_t{5}, size_t(n) * 16 * lanes, size_t(n) * 16 * 25 + 3}) {
          check_all_reduce(algorithm, n, lanes, count, lanes % 2 == 0, lanes == 3 ? 1 : 4);
        }
      }
    }
  }
}

TEST_MAIN
