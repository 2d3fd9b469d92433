// The emulated device: order in a stream and between streams, lateness, poison, errors. Under ThreadSanitizer a wait
// that is missing is a data race.
#include "device/device.h"

#include <cstring>
#include <vector>

#include "support/check.h"

using namespace dcoll;
using namespace dcoll::device;

namespace {

constexpr size_t kBytes = 10000;

struct Streams {
  Device& device = device_of(kEmulated);
  Stream one = device.make_stream(), two = device.make_stream();
  ~Streams() {
    device.destroy_stream(one);
    device.destroy_stream(two);
  }
};

std::vector<unsigned char> filled(unsigned char value) { return std::vector<unsigned char>(kBytes, value); }

}  // namespace

TEST(copies_of_a_stream_are_made_in_order) {
  Streams s;
  auto from = filled(7), between = filled(0), to = filled(0);
  s.device.copy(between.data(), from.data(), kBytes, s.one);
  s.device.copy(to.data(), between.data(), kBytes, s.one);
  const auto event = s.device.make_event();
  event->record(s.one);
  event->wait();
  CHECK(event->done());
  CHECK(to == from);
}

TEST(an_event_orders_two_streams) {
  for (int round = 0; round < 20; ++round) {
    Streams s;
    auto from = filled(static_cast<unsigned char>(round + 1)), between = filled(0), to = filled(0);
    const auto event = s.device.make_event();
    s.device.copy(between.data(), from.data(), kBytes, s.one);
    event->record(s.one);
    event->hold(s.two);
    s.device.copy(to.data(), between.data(), kBytes, s.two);
    event->record(s.two);
    event->wait();
    CHECK(to == from);
  }
}

// The second stream does not wait for the first, which is held back until it has read.
TEST(a_forgotten_wait_shows) {
  Streams s;
  auto from = filled(7), to = filled(0);
  auto* between = static_cast<unsigned char*>(s.device.allocate(kBytes));
  const auto read = s.device.make_event(), written = s.device.make_event();
  s.device.copy(to.data(), between, kBytes, s.two);
  read->record(s.two);
  read->hold(s.one);
  s.device.copy(between, from.data(), kBytes, s.one);
  written->record(s.one);
  CHECK(!read->done());  // results appear late
  CHECK(!written->done());
  written->wait();
  CHECK(to == filled(kPoison));
  CHECK(std::memcmp(between, from.data(), kBytes) == 0);
  s.device.free(between);
}

TEST(the_callers_thread_is_a_stream) {
  Streams s;
  auto from = filled(7), to = filled(0);
  const auto event = s.device.make_event();
  CHECK(event->done());  // never recorded
  event->record(nullptr);
  CHECK(event->done());
  s.device.copy(to.data(), from.data(), kBytes, s.one);
  event->record(s.one);
  event->hold(nullptr);  // waits
  CHECK(event->done());
  CHECK(to == from);
}

TEST(an_error_stays) {
  auto from = filled(7), to = filled(0);
  Streams s;  // ends first, with what is in its streams
  const auto event = s.device.make_event();
  const auto copy = [&] {
    s.device.copy(to.data(), from.data(), kBytes, s.one);
    event->record(s.one);
    event->wait();
  };
  fail_emulated_after(2);
  copy();
  CHECK_THROWS(copy(), DeviceError, "emulated:0: a copy failed");
  CHECK_THROWS(event->done(), DeviceError, "emulated:0");
  CHECK_THROWS(s.device.copy(to.data(), from.data(), kBytes, s.one), DeviceError, "emulated:0");
  fail_emulated_after(-1);
  event->wait();
  copy();
  CHECK(to == from);
}

TEST(a_gpu_that_is_not_there_is_refused_with_the_reason) {
  CHECK_THROWS(device_of(77), ArgumentError, "cuda:77");
  CHECK(std::string(kind_name(kEmulated)) == "emulated");
  CHECK(std::string(kind_name(0)) == "cuda");
}

TEST_MAIN
