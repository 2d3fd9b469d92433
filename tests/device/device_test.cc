// The emulated device: order in a stream and between streams, lateness, poison, errors, memory that is opened a second
// time, and the arena. Under ThreadSanitizer a wait that is missing is a data race.
#include "device/device.h"

#include <cstring>
#include <memory>
#include <vector>

#include "device/arena.h"
#include "device/nccl.h"
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
  CHECK_THROWS(copy(), DeviceError, "emulated:0: a copy or a kernel failed");
  CHECK_THROWS(event->done(), DeviceError, "emulated:0");
  CHECK_THROWS(s.device.copy(to.data(), from.data(), kBytes, s.one), DeviceError, "emulated:0");
  fail_emulated_after(-1);
  event->wait();
  copy();
  CHECK(to == from);
}

TEST(a_stream_is_drained_though_the_device_has_failed) {
  auto from = filled(7), between = filled(0), to = filled(0);
  Streams s;
  s.device.copy(between.data(), from.data(), kBytes, s.one);
  s.device.copy(to.data(), between.data(), kBytes, s.one);
  fail_emulated_after(0);  // what was begun still writes kPoison
  s.device.drain(s.one);
  const auto begun = to;
  s.device.drain(nullptr);
  fail_emulated_after(-1);
  CHECK(begun == filled(kPoison));
}

TEST(memory_that_is_opened_is_the_same) {
  Streams s;
  auto* own = static_cast<unsigned char*>(s.device.allocate(kBytes));
  auto* opened = static_cast<unsigned char*>(s.device.open(s.device.handle_of(own)));
  CHECK(opened != own);
  CHECK_EQ(opened[kBytes - 1], kPoison);
  opened[3] = 7;
  CHECK_EQ(own[3], 7);
  s.device.free(own);
  CHECK_EQ(opened[3], 7);  // lives on
  s.device.close(opened);
  CHECK_THROWS(s.device.open({}), DeviceError, "emulated:0: memory of another process cannot be opened: the process");
}

TEST(kernels_are_late_and_in_order) {
  Streams s;
  std::vector<float> a(100, 1), b(100, 2), sum(100, 0), half(100, 0);
  std::vector<const void*> from{a.data(), b.data()};
  std::vector<void*> to{sum.data(), a.data()};
  s.device.reduce_n_to_n(to, from, 100, DType::kFloat32, ReduceOp::kSum, 2.0, s.one);
  s.device.scale(half.data(), sum.data(), 100, DType::kFloat32, 0.5, s.one);
  const auto end = s.device.make_event();
  end->record(s.one);
  from.clear();  // what it is told is its own
  to.clear();
  CHECK(!end->done());
  s.device.wait_for_all();
  CHECK(end->done());
  CHECK(sum == std::vector<float>(100, 6) && a == sum && half == std::vector<float>(100, 3));
}

TEST(blocks_of_an_arena) {
  Arena& arena = arena_of(kEmulated);
  CHECK(!segment_at(0) && !place_of(&arena, 1));
  auto first = arena.alloc(1000), second = arena.alloc(1);
  CHECK_EQ(second->data() - first->data(), 1024);
  CHECK(segment_at(0)->data == first->data() && segment_at(0)->bytes == Arena::kSegmentBytes && !segment_at(1));
  const auto place = place_of(second->data(), 1);
  CHECK(place && place->segment == 0 && place->offset == 1024);
  CHECK(!place_of(second->data(), Arena::kSegmentBytes) && !place_of(first->data() - 1, 1));
  std::byte* const begin = first->data();
  first->set_idle();
  first.reset();
  second->set_idle();
  second.reset();  // one block again, with what is behind it
  const auto whole = arena.alloc(Arena::kSegmentBytes);
  CHECK(whole->data() == begin && !segment_at(1));
  const auto long_one = arena.alloc(Arena::kSegmentBytes + 1);
  CHECK_EQ(segment_at(1)->bytes, Arena::kSegmentBytes + (size_t{2} << 20));
  CHECK_EQ(place_of(long_one->data(), long_one->bytes())->segment, size_t{1});
}

TEST(a_block_is_given_out_again_when_the_device_is_done) {
  Streams s;
  Arena& arena = arena_of(kEmulated);
  constexpr size_t kLong = 3 * Arena::kSegmentBytes;
  auto block = arena.alloc(kLong);
  const auto from = filled(7);
  s.device.copy(block->data(), from.data(), kBytes, s.one);
  const std::byte* const data = block->data();
  block.reset();
  const auto again = arena.alloc_or_wait(kLong);
  CHECK(again->data() == data && std::memcmp(data, from.data(), kBytes) == 0);
  CHECK(arena.alloc(kLong)->data() != data);
}

TEST(a_gpu_that_is_not_there_is_refused_with_the_reason) {
  CHECK_THROWS(device_of(77), ArgumentError, "cuda:77");
  CHECK(std::string(kind_name(kEmulated)) == "emulated");
  CHECK(std::string(kind_name(0)) == "cuda");
}

// Its least and greatest of floating types lose NaNs, which ours keep.
TEST(what_nccl_reduces_as_ours_do) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    CHECK(nccl_reduces(dtype, ReduceOp::kSum) && nccl_reduces(dtype, ReduceOp::kProduct));
    CHECK(!nccl_reduces(dtype, ReduceOp::kMax) && !nccl_reduces(dtype, ReduceOp::kMin));
  }
  CHECK(nccl_reduces(DType::kInt32, ReduceOp::kMax) && nccl_reduces(DType::kUInt8, ReduceOp::kMin));
  CHECK(!nccl_reduces(DType::kBool, ReduceOp::kMax) && !nccl_reduces(DType::kInt32, ReduceOp::kBitAnd));
}

TEST_MAIN
