// What the calls of csrc/device/cuda.cc do beside their work, without a GPU (fake_cudart.h): which devices get a
// context by them, and whether they break a graph that somebody captures.
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "device/device.h"
#include "device/fake_cudart.h"
#include "engine/core/staging.h"
#include "support/check.h"

using namespace dcoll;
using namespace dcoll::device;

namespace {

constexpr int kOwn = 1;  // of threads that do not choose, device 0 is current
constexpr size_t kBytes = 4096;

// A thread in which no device was chosen. What is thrown there comes out here.
void in_new_thread(const std::function<void()>& run) {
  std::exception_ptr error;
  std::thread([&] {
    try {
      run();
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

// What the calls work on. All of it is made in the first calls, and let go of in the last.
struct Things {
  Device& device = device_of(kOwn);
  Stream stream = nullptr;
  std::unique_ptr<Event> event, held_up;
  void *data = nullptr, *opened = nullptr;
  std::vector<std::byte> host = std::vector<std::byte>(kBytes);
};

struct Use {
  std::string name;
  std::function<void(Things&)> run;
};
const std::vector<Use> kUses = {
    {"place", [](Things& t) { CHECK_EQ(t.device.place(), std::string("0000:01:00.0")); }},
    {"make_stream", [](Things& t) { t.stream = t.device.make_stream(); }},
    {"make_event", [](Things& t) { t.event = t.device.make_event(); }},
    {"record", [](Things& t) { t.event->record(t.stream); }},
    {"done", [](Things& t) { CHECK(t.event->done()); }},
    {"not done",
     [](Things& t) {
       fake_cudart::hold_up(t.stream, true);
       CHECK(!t.event->done());
       fake_cudart::hold_up(t.stream, false);
     }},
    {"wait",
     [](Things& t) {
       fake_cudart::hold_up(t.stream, true);
       std::thread later([&] {
         std::this_thread::sleep_for(std::chrono::milliseconds(5));
         fake_cudart::hold_up(t.stream, false);
       });
       t.event->wait();
       later.join();
     }},
    {"hold", [](Things& t) { t.event->hold(t.stream); }},
    {"allocate", [](Things& t) { t.data = t.device.allocate(kBytes); }},
    {"open", [](Things& t) { t.opened = t.device.open(t.device.handle_of(t.data)); }},
    {"pin", [](Things& t) { CHECK(t.device.pin(t.host.data(), kBytes)); }},
    {"is_capturing", [](Things& t) { CHECK(!t.device.is_capturing(t.stream)); }},
    {"copy", [](Things& t) { t.device.copy(t.data, t.host.data(), kBytes, t.stream); }},
    {"as_current", [](Things& t) { t.device.as_current([] {}); }},
    {"wait_for_all", [](Things& t) { t.device.wait_for_all(); }},
    {"drain", [](Things& t) { t.device.drain(t.stream); }},
    {"close", [](Things& t) { t.device.close(t.opened); }},
    {"unpin", [](Things& t) { t.device.unpin(t.host.data()); }},
    {"free", [](Things& t) { t.device.free(t.data); }},
    {"an event's end", [](Things& t) { t.event.reset(); }},
    {"destroy_stream", [](Things& t) { t.device.destroy_stream(t.stream); }},
};

std::string list(const std::vector<std::string>& calls) {
  std::string text;
  for (const std::string& call : calls) text += ": " + call;
  return text;
}
// The device of which there is a context beside this rank's own, and the call that made it.
std::string elsewhere() {
  std::string text;
  for (const auto& [device, call] : fake_cudart::contexts()) {
    if (device != kOwn) text += ": " + std::to_string(device) + " by " + call;
  }
  return text;
}

}  // namespace

// As the thread does that drives: whichever call is its first one, at least 300 MB of every rank would be on device 0.
TEST(no_call_makes_a_context_on_another_device) {
  fake_cudart::reset();
  Things things;
  for (const Use& use : kUses) {
    in_new_thread([&] { use.run(things); });
    CHECK_EQ(use.name + elsewhere(), use.name);
  }
}

TEST(the_current_device_is_the_callers) {
  fake_cudart::reset();
  Things things;
  device_of(2).wait_for_all();  // has a context
  for (const Use& use : kUses) {
    in_new_thread([&] {
      device_of(2).as_current([&] { use.run(things); });
      things.device.as_current([&] { device_of(2).wait_for_all(); });
    });
  }
  CHECK_EQ(elsewhere(), std::string(": 2 by cudaSetDevice"));
}

// torch.cuda.graph() of another thread, while this rank's operations are under way. None of those waits for the device.
TEST(a_graph_that_somebody_captures_is_not_broken) {
  fake_cudart::reset();
  Things things;
  fake_cudart::capture_elsewhere(true);
  for (const Use& use : kUses) {
    if (use.name == "wait_for_all") continue;
    in_new_thread([&] {
      use.run(things);
      CHECK_EQ(fake_cudart::mode(), fake_cudart::kGlobal);  // as the caller had it
    });
    CHECK_EQ(use.name + list(fake_cudart::broken()), use.name);
  }
}

// The wait would end the capture with an error. It is refused, and right once the graph is there.
TEST(a_graph_does_not_wait_for_what_began_before_it) {
  fake_cudart::reset();
  Device& device = device_of(kOwn);
  const Stream caller = device.make_stream(), other = device.make_stream();
  const auto lane = std::make_shared<StagingLane>(device, &Memory::plain);
  {
    std::vector<float> operand(10, 1.0f);
    Request request{.in = operand.data(), .out = operand.data(), .count = 10, .device = kOwn, .stream = caller};
    Staging staging(lane, request, {.rank = 0, .size = 2, .job_rank = 0}, kBytes, /*may_stay=*/false);
    for (const Stream captured : {caller, other}) {
      fake_cudart::capture(captured, true);
      CHECK_THROWS(staging.hold(other), ArgumentError, "wait for it outside of torch.cuda.graph()");
      fake_cudart::capture(captured, false);
    }
    staging.hold(other);
    CHECK(staging.settled());
  }
  CHECK(fake_cudart::broken().empty());
  for (const Stream stream : {caller, other}) device.destroy_stream(stream);
}

// The default stream is as good as captured while a stream is that waits for it; CUDA then refuses to say.
TEST(the_default_stream_beside_a_capture_is_captured) {
  fake_cudart::reset();
  Device& device = device_of(kOwn);
  const auto lane = std::make_shared<StagingLane>(device, &Memory::plain);
  {
    std::vector<float> operand(10, 1.0f);
    Request request{.in = operand.data(), .out = operand.data(), .count = 10, .device = kOwn};
    Staging staging(lane, request, {.rank = 0, .size = 2, .job_rank = 0}, kBytes, /*may_stay=*/false);
    fake_cudart::capture_beside_default(true);
    CHECK(device.is_capturing(nullptr));
    CHECK_THROWS(staging.hold(nullptr), ArgumentError, "wait for it outside of torch.cuda.graph()");
    CHECK_EQ(fake_cudart::last_error(), 0);  // or torch's next check finds it
    fake_cudart::capture_beside_default(false);
    CHECK(!device.is_capturing(nullptr));
    staging.hold(nullptr);
  }
  CHECK(fake_cudart::broken().empty());
}

// The runtime that the kernels are linked with finds a driver that it cannot use.
TEST(a_device_that_runs_no_kernels_says_so) {
  fake_cudart::reset();
  CHECK(!device_of(kOwn).has_kernels());
  CHECK_EQ(elsewhere(), std::string());
}

TEST(a_device_that_fails_is_named) {
  fake_cudart::reset();
  Things things;
  for (const Use& use : std::span(kUses).first(4)) use.run(things);
  fake_cudart::fail("cudaEventQuery");
  CHECK_THROWS(things.event->done(), DeviceError,
               "cuda:1: what was put into a stream failed: launch failure (CUDA error 719)");
  fake_cudart::fail("cudaSetDevice");
  in_new_thread([&] {
    CHECK_THROWS(things.event->done(), DeviceError, "cuda:1: cudaSetDevice failed");
    things.device.drain(things.stream);  // throws nothing
    things.event.reset();
    CHECK_EQ(fake_cudart::mode(), fake_cudart::kGlobal);
  });
  fake_cudart::reset();
  things.device.destroy_stream(things.stream);
}

TEST_MAIN
