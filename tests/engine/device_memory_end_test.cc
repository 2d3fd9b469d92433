// The end of a communicator whose ranks have opened memory of a device: for what it waits.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "device/arena.h"
#include "engine/core/staging.h"
#include "engine/node/device_memory.h"
#include "held.h"
#include "rank_threads.h"
#include "support/check.h"

using namespace dcoll;
using namespace dcoll::test;

// Its end waits for the last that reads its block, and for nothing else that the device does.
TEST(what_it_waits_for_when_it_ends) {
  run_ranks(2, [](Communicator& comm) {
    if (comm.rank() > 0) return;
    for (const bool waits : {true, false}) {
      Held own, other;
      auto memory = std::make_unique<DeviceMemory>(*comm.as_made().board, comm.members().window);
      memory->block(device::kEmulated, 100);
      if (waits) memory->left_behind(device::kEmulated, own.stream);
      std::atomic<bool> ended{false};
      std::thread end([&] {
        memory.reset();
        ended.store(true);
      });
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      const bool had_ended = ended.load();
      own.held.store(false);
      other.held.store(false);
      end.join();
      CHECK_EQ(had_ended, !waits);
    }
  });
}

// Whose block another then uses: the caller's stream waits for the result, and the program does not.
TEST(the_last_result_is_copied_out_before_the_end) {
  constexpr size_t kBytes = DeviceMemory::kSliceBytes, kFloats = kBytes / sizeof(float);
  constexpr size_t kEnd = 1 << 16;  // of a copy: it comes long after the begin
  std::vector<float> results[2];
  std::vector<std::shared_ptr<Operation>> operations(2);
  device::Device& device = device::device_of(device::kEmulated);
  auto world = connect_threads(2, test_settings());
  on_threads(2, [&](int rank) {
    const auto at = static_cast<size_t>(rank);
    results[at].assign(kFloats, static_cast<float>(rank + 1));
    Request request{.in = results[at].data(), .out = results[at].data(), .count = kFloats, .device = device::kEmulated};
    request.stream = device.make_stream();
    operations[at] = run(*world[at], request);
    operations[at]->staging->hold(request.stream);
    world[at]->close();
    world[at].reset();
  });
  std::vector<std::unique_ptr<device::Block>> next;
  for (int i = 0; i < 4; ++i) {
    next.push_back(device::arena_of(device::kEmulated).alloc(kBytes));
    std::fill_n(next.back()->data() + kBytes - kEnd, kEnd, std::byte{0});
  }
  for (const auto& operation : operations) {
    operation->staging->wait();
    device.destroy_stream(operation->request.stream);
  }
  for (const std::vector<float>& result : results) CHECK_EQ(result.back(), 3.0f);
}

TEST_MAIN
