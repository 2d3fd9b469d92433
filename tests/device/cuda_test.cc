// What the calls of csrc/device/cuda.cc do beside their work, without a GPU (fake_cudart.h): which devices get a
// context by them, and whether they break a graph that somebody captures. And the ways in which another process opens
// memory.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/hash.h"
#include "device/descriptors.h"
#include "device/device.h"
#include "device/fake_cudart.h"
#include "engine/core/staging.h"
#include "support/check.h"
#include "transport/mapped/shm_socket.h"

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

// By CUDA IPC, and where the device refuses that.
void for_both_ways(const std::function<void()>& run) {
  for (const bool by_ipc : {true, false}) {
    fake_cudart::reset();
    if (!by_ipc) fake_cudart::fail("cudaIpcGetMemHandle");
    run();
  }
}

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
  for_both_ways([] {
    Things things;
    for (const Use& use : kUses) {
      in_new_thread([&] { use.run(things); });
      CHECK_EQ(use.name + elsewhere(), use.name);
    }
  });
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
  for_both_ways([] {
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
  });
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

namespace {

constexpr size_t kUnit = fake_cudart::kGranularity;

// What this process holds on to: open files, and mappings of memory of the driver's.
std::string held() {
  using Files = std::filesystem::directory_iterator;
  std::ifstream maps("/proc/self/maps");
  size_t mapped = 0;
  for (std::string line; std::getline(maps, line);) mapped += line.find("fake-cuda") != std::string::npos ? 1 : 0;
  return std::to_string(std::distance(Files("/proc/self/fd"), Files())) + " files, " + std::to_string(mapped) +
         " mapped";
}
// The thread that passes descriptors closes its sockets when it comes to it.
void check_held(const std::string& want) {
  for (int i = 0; i < 5000 && held() != want; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK_EQ(held(), want);
}

// Memory of a device that CUDA IPC does not show; what was held before it, once descriptors are shown at all.
struct Shown {
  Device& device = device_of(kOwn);
  std::string before;
  unsigned char* data;
  Handle handle{};
  Shown() {
    fake_cudart::reset();
    fake_cudart::fail("cudaIpcGetMemHandle");
    device.free(device.allocate(1));
    before = held();
    data = static_cast<unsigned char*>(device.allocate(kUnit + 1));
    handle = device.handle_of(data);
  }
  ~Shown() { device.free(data); }
};

struct Way {
  explicit Way(const char* way) { setenv("DCOLL_GPU_SHARE", way, 1); }
  ~Way() { unsetenv("DCOLL_GPU_SHARE"); }
};

void in_another_process(const std::function<void()>& run) {
  const pid_t other = fork();
  if (other == 0) {
    try {
      run();
    } catch (const std::exception& e) {
      std::fprintf(stderr, "%s\n", e.what());
      _exit(1);
    }
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(other, &status, 0) == other && status == 0);
}

}  // namespace

TEST(another_process_opens_memory_that_cuda_ipc_does_not_show) {
  Shown shown;
  CHECK(has_descriptor(shown.handle) && shown.device.handle_of(shown.data) == shown.handle);
  CHECK(fake_cudart::devices_of(shown.data) == (std::set{0, kOwn}));  // the third cannot read it
  shown.data[0] = 7;
  in_another_process([&] {
    const std::string before = held();
    Device& device = device_of(2);  // as it numbers the same one, or another
    auto* const opened = static_cast<unsigned char*>(device.open(shown.handle));
    CHECK(opened != shown.data && opened[0] == 7);
    CHECK(fake_cudart::devices_of(opened) == (std::set{2}));
    opened[2 * kUnit - 1] = 9;  // it was rounded up
    device.close(opened);
    check_held(before);
  });
  CHECK_EQ(shown.data[2 * kUnit - 1], 9);
  shown.device.free(std::exchange(shown.data, nullptr));
  check_held(shown.before);
  CHECK_THROWS(shown.device.open(shown.handle), DeviceError,
               "cuda:1: memory of another process cannot be opened: the process that has shown it does so no more");
}

// It is cudaMalloc()'s then, and who asks for a handle is told what has failed.
TEST(memory_that_cannot_be_shown_is_there_all_the_same) {
  const Shown shown;
  const std::string before = held();
  for (const char* const call : {"cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle",
                                 "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"}) {
    fake_cudart::reset();
    fake_cudart::fail("cudaIpcGetMemHandle");
    fake_cudart::fail(call);
    void* const data = shown.device.allocate(kBytes);
    std::memset(data, 1, kBytes);
    const std::string why = "cuda:1: cudaIpcGetMemHandle failed: launch failure (CUDA error 719), and cuda:1: ";
    CHECK_THROWS(shown.device.handle_of(data), DeviceError, why + call + " failed: refused (CUDA error 801)");
    shown.device.free(data);
    check_held(before);
  }
  fake_cudart::fail("cudaMalloc");
  CHECK_THROWS(shown.device.allocate(kBytes), DeviceError, "cuda:1: cudaMalloc failed");
  check_held(before);
}

TEST(memory_that_cannot_be_opened_leaves_nothing) {
  const Shown shown;
  const std::string before = held();
  for (const char* const call :
       {"cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"}) {
    fake_cudart::reset();
    fake_cudart::fail(call);
    CHECK_THROWS(shown.device.open(shown.handle), DeviceError, std::string("cuda:1: ") + call + " failed: refused");
    check_held(before);
  }
  Handle of_nobody = shown.handle;
  of_nobody[8] ^= std::byte{1};  // its socket
  CHECK_THROWS(shown.device.open(of_nobody), DeviceError, "the process that shows it has ended");
  check_held(before);
}

TEST(the_way_can_be_chosen) {
  Device& device = device_of(kOwn);
  fake_cudart::reset();
  for (const char* const way : {"auto", "ipc", "descriptors"}) {
    const Way chosen(way);
    void* const data = device.allocate(kBytes);
    CHECK_EQ(has_descriptor(device.handle_of(data)), std::string(way) == "descriptors");
    device.free(data);
  }
  {
    const Way chosen("ipc");
    fake_cudart::fail("cudaIpcGetMemHandle");
    void* const data = device.allocate(kBytes);
    CHECK_THROWS(device.handle_of(data), DeviceError, "cuda:1: cudaIpcGetMemHandle failed");
    device.free(data);
  }
  fake_cudart::reset();
  const Way chosen("descriptors");
  fake_cudart::fail("cuMemCreate");
  void* const data = device.allocate(kBytes);
  CHECK_THROWS(device.handle_of(data), DeviceError, "cuda:1: cuMemCreate failed");
  device.free(data);
}

// A process that connects and is then stopped, or wants something else.
TEST(strangers_do_not_keep_descriptors_from_others) {
  const Shown shown;
  uint64_t address[2];
  std::memcpy(address, shown.handle.data() + sizeof(uint64_t), sizeof address);
  std::vector<Fd> strangers;
  for (int i = 0; i < 3; ++i) strangers.push_back(connect_to("dcoll-memory-" + hex(address[0]) + hex(address[1])));
  const uint64_t unknown = 12345;
  CHECK(send_packet(strangers[1], &unknown, sizeof unknown) && send_packet(strangers[2], &unknown, 3));
  for (int i = 0; i < 3; ++i) shown.device.close(shown.device.open(shown.handle));
}

TEST_MAIN
