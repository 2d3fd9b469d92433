// Collectives on the emulated device, in memory that ranks open of each other: which ways ranks agree on, and words of
// a rank's memory that a stray write has damaged.
#include "engine/node/device_memory.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "engine/collective/choose_path.h"
#include "engine/core/staging.h"
#include "held.h"
#include "rank_threads.h"
#include "support/check.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

constexpr size_t kCount = 30000;  // longer than what each rank reduces by itself

struct Operand {
  explicit Operand(float value, size_t bytes = kCount * sizeof(float))
      : block(device::arena_of(device::kEmulated).alloc(bytes)) {
    for (size_t i = 0; i < kCount; ++i) data()[i] = value;
  }
  float* data() const { return reinterpret_cast<float*>(block->data()); }
  Request request() const { return {.in = data(), .out = data(), .count = kCount, .device = device::kEmulated}; }
  bool is(float value) const {
    for (size_t i = 0; i < kCount; ++i) {
      if (data()[i] != value) return false;
    }
    return true;
  }
  std::unique_ptr<device::Block> block;
};

// Until what the device still copies is there too.
void reduce(Communicator& comm, const Request& request) {
  const auto operation = run(comm, request);
  operation->staging->wait();
}

bool stayed(Communicator& comm, const Request& request) {
  const auto operation = run(comm, request);
  operation->staging->wait();
  return !operation->staging->goes_by_host();
}

}  // namespace

TEST(an_all_reduce_stays_on_the_device) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [](Communicator& comm) {
      const Operand one(static_cast<float>(comm.rank() + 1));
      CHECK(stayed(comm, one.request()));
      CHECK(one.is(static_cast<float>(comm.size() * (comm.size() + 1) / 2)));
    });
  }
}

// choose_path() alone says where a call goes; what was copied from a device goes as memory of the host does.
TEST(the_path_of_a_call_on_a_device) {
  run_ranks(2, [](Communicator& comm) {
    const Operand one(1);
    const Request request = one.request();
    const Fabric& fabric = comm.as_made();
    Call call = request.call();
    CHECK(choose_path(fabric, call) == Path::kNccl);  // until the ranks have found that there is none
    CHECK(stayed(comm, request));
    CHECK(choose_path(fabric, call) == Path::kOpened);
    CHECK(path_by_host(fabric, call) == Path::kNodeDirect);
    call.algo = "ring";
    CHECK(choose_path(fabric, call) == Path::kSchedule);
    call.algo = {};
    call.op = ReduceOp::kAdasum;
    CHECK(choose_path(fabric, call) == Path::kAdasum);
    call.device = device::kHost;
    call.op = ReduceOp::kSum;
    CHECK(choose_path(fabric, call) == Path::kNodeDirect);
  });
}

TEST(adasum_goes_by_the_host) {
  run_ranks(2, [](Communicator& comm) {
    const Operand one(1);
    Request request = one.request();
    request.op = ReduceOp::kAdasum;
    CHECK(!stayed(comm, request));
    CHECK(one.is(1));  // of equal operands it is their average
  });
}

// And the caller's stream goes on after it, once it was asked to. Of every kind, on the device and through the host.
struct Asked {
  Request request;            // all but where it is
  size_t count;               // floats of the result
  float (*expected)(size_t);  // of two ranks that bring 1 and 2 everywhere
};

std::vector<Asked> one_of_each(int rank) {
  const auto one = [](size_t) { return 1.0f; };
  const auto sum = [](size_t) { return 3.0f; };
  const auto both = [](size_t i) { return i < kCount ? 1.0f : 2.0f; };
  const auto halves = [](size_t i) { return i < kCount / 2 ? 1.0f : 2.0f; };
  constexpr size_t kBytes = kCount * sizeof(float), kRow = sizeof(float);
  const Kind message = rank == 0 ? Kind::kSend : Kind::kReceive;
  return {
      {{.kind = Kind::kAllReduce, .count = kCount}, kCount, sum},
      {{.kind = Kind::kAllReduce, .count = 100}, 100, sum},
      {{.kind = Kind::kReduceScatter, .count = kCount}, kCount / 2, sum},
      {{.kind = Kind::kBroadcast, .count = kBytes}, kCount, one},
      {{.kind = Kind::kAllGather, .count = kCount, .row_elems = kRow, .out_bytes = 2 * kBytes}, 2 * kCount, both},
      {{.kind = Kind::kAllToAll,
        .count = kCount,
        .row_elems = kRow,
        .splits = {kCount / 2, kCount / 2},
        .out_bytes = kBytes},
       kCount,
       halves},
      {{.kind = message, .count = kBytes, .root = 1 - rank}, kCount, one},
  };
}

void expect_order(Communicator& comm, const Asked& asked, bool stays) {
  device::Device& device = device::device_of(device::kEmulated);
  const device::Stream stream = device.make_stream();
  const Operand in(0), made(static_cast<float>(comm.rank() + 1)), before(9, 2 * kCount * sizeof(float));
  const Operand out(0, 2 * kCount * sizeof(float)), taken(0, 2 * kCount * sizeof(float));
  Request request = asked.request;
  const bool has_one = request.kind == Kind::kBroadcast;
  request.in = in.data();
  request.out = has_one ? in.data() : out.data();
  request.device = device::kEmulated;
  request.stream = stream;
  for (int i = 0; i < 20; ++i) device.copy(out.data(), before.data(), out.block->bytes(), stream);
  device.copy(in.data(), made.data(), kCount * sizeof(float), stream);
  const auto operation = run(comm, request);
  operation->staging->hold(stream);
  device.copy(taken.data(), request.out, asked.count * sizeof(float), stream);
  device.wait_for_all();
  CHECK_EQ(!operation->staging->goes_by_host(), stays);
  for (size_t i = 0; i < asked.count && request.kind != Kind::kSend; ++i) {
    CHECK_EQ(taken.data()[i], asked.expected(i));
  }
  device.destroy_stream(stream);
}

TEST(it_begins_after_what_is_in_the_callers_stream) {
  for (const bool by_host : {false, true}) {
    Settings settings = test_settings();
    if (by_host) settings.gpu_engine = "host";
    run_ranks(2, settings, [&](Communicator& comm) {
      for (int round = 0; round < 3; ++round) {
        for (const Asked& asked : one_of_each(comm.rank())) {
          expect_order(comm, asked, !by_host && !is_point(asked.request.kind));
        }
      }
    });
  }
}

// The host does not wait for the device.
TEST(a_rank_alone_goes_on_at_once) {
  struct Case {
    Kind kind;
    ReduceOp op;
    double prescale, postscale;
    float expected;
  };
  for (const Case one :
       {Case{Kind::kAllReduce, ReduceOp::kSum, 1, 1, 3}, Case{Kind::kBroadcast, {}, 1, 1, 3},
        Case{Kind::kReduceScatter, ReduceOp::kMax, 1, 1, 3}, Case{Kind::kAllReduce, ReduceOp::kAverage, 2, 1, 6},
        Case{Kind::kAllReduce, ReduceOp::kSum, 1, 3, 9}, Case{Kind::kAllReduce, ReduceOp::kSum, 2, 3, 18},
        Case{Kind::kReduceScatter, ReduceOp::kSum, 2, 3, 18}}) {
    run_ranks(1, [&](Communicator& comm) {
      const Operand in(0), made(3), out(0), taken(0);
      Held before;
      constexpr size_t kBytes = kCount * sizeof(float);
      before.device.copy(in.data(), made.data(), kBytes, before.stream);
      const auto begun = before.device.make_event();
      begun->record(before.stream);
      Request request = in.request();
      request.kind = one.kind;
      request.op = one.op;
      request.prescale = one.prescale;
      request.postscale = one.postscale;
      request.out = one.kind == Kind::kBroadcast ? in.data() : out.data();
      if (one.kind == Kind::kBroadcast) request.count = kBytes;
      request.stream = before.stream;
      const auto operation = comm.submit(request, Communicator::Start::kByWaiter);
      CHECK(comm.wait_for(*operation, 30));
      CHECK(!begun->done());
      CHECK(!operation->staging->settled());
      operation->staging->hold(before.stream);
      before.device.copy(taken.data(), request.out, kBytes, before.stream);
      before.held.store(false);
      before.device.wait_for_all();
      CHECK(operation->staging->settled());
      CHECK(taken.is(one.expected));
      CHECK(!operation->staging->goes_by_host());
    });
  }
}

TEST(a_rank_alone_without_kernels_scales_on_the_host) {
  run_ranks(1, [](Communicator& comm) {
    const Operand one(3);
    Request request = one.request();
    request.prescale = 2;
    device::let_emulated_compute(false);
    CHECK(!stayed(comm, request));
    device::let_emulated_compute(true);
    CHECK(one.is(6));
  });
}

// It is not the network that the ranks wait for.
TEST(a_device_that_hangs_is_named) {
  for (const char* const engine : {"auto", "host"}) {
    Settings settings = test_settings();
    settings.timeout_s = 1;
    settings.gpu_engine = engine;
    auto world = connect_threads(2, settings);
    const Operand ones[2] = {Operand(1), Operand(2)};
    Held streams[2];
    on_threads(2, [&](int rank) {
      const auto at = static_cast<size_t>(rank);
      Request request = ones[at].request();
      request.stream = streams[at].stream;
      const auto operation = world[at]->submit(request);
      CHECK_THROWS(world[at]->wait(*operation), Error, "waiting for what is under way on emulated:0 of rank ");
      streams[at].held.store(false);
    });
  }
}

// The device fails between the work and the event behind it, so that no event tells when the work is over.
TEST(nothing_is_written_once_a_failure_is_told) {
  auto lane = std::make_shared<StagingLane>(device::device_of(device::kEmulated), &Memory::uninitialized);
  const Operand from(1), between(2), to(3);
  Request request = to.request();
  Staging staging(lane, request, {0, 1, 0}, request.bytes(), /*may_stay=*/true);
  const auto work = [&](device::Device& device, device::Stream stream) {
    device.copy(between.data(), from.data(), request.bytes(), stream);
    device.copy(to.data(), between.data(), request.bytes(), stream);
    device::fail_emulated_after(0);
  };
  CHECK_THROWS(staging.put(work), device::DeviceError, "(on rank 0)");
  for (size_t i = 0; i < kCount; ++i) to.data()[i] = 4;
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(to.is(4));
  device::fail_emulated_after(-1);
}

TEST(all_go_by_the_host_where_one_is_told_to) {
  std::vector<std::shared_ptr<Communicator>> world = connect_threads(2, test_settings());
  on_threads(2, [&](int rank) {
    Communicator& comm = *world[static_cast<size_t>(rank)];
    const Operand one(static_cast<float>(rank + 1));
    Request request = one.request();
    CHECK(stayed(comm, request));
    CHECK(one.is(3));
    // A rank whose operation is on the host already, as one that was submitted when it was: the other follows.
    const auto operation = comm.submit(Request(request), Communicator::Start::kByWaiter);
    if (rank == 1) operation->staging->go_by_host(operation->request);
    comm.wait(*operation);
    operation->staging->wait();
    CHECK(operation->staging->goes_by_host());
    CHECK(one.is(6));
    CHECK(stayed(comm, request));  // the next one does not
    CHECK(one.is(12));
    comm.close();
  });
}

struct Two {
  std::vector<std::shared_ptr<Communicator>> world = connect_threads(2, test_settings());
  ~Two() {
    on_threads(2, [&](int rank) { world[static_cast<size_t>(rank)]->close(); });
  }
  // In place; whether it stayed on the device.
  bool call(const Operand& one, const Operand& other) {
    std::atomic<int> stay{0};
    on_threads(2, [&](int rank) {
      stay += stayed(*world[static_cast<size_t>(rank)], (rank == 0 ? one : other).request()) ? 1 : 0;
    });
    CHECK(stay == 0 || stay == 2);
    return stay == 2;
  }
};

// As of a machine that forbids it.
TEST(all_go_by_the_host_where_memory_cannot_be_opened) {
  Two ranks;
  const Operand one(1), other(2);
  device::share_emulated(false);
  CHECK(!ranks.call(one, other));
  device::share_emulated(true);
  CHECK(!ranks.call(one, other));  // for good
  CHECK(one.is(6) && other.is(6));
}

TEST(all_go_by_the_host_where_later_memory_cannot_be_opened) {
  Two ranks;
  const Operand one(1), other(2);
  CHECK(ranks.call(one, other));
  const Operand later(4, 2 * device::Arena::kSegmentBytes);
  device::share_emulated(false);
  CHECK(ranks.call(one, other));
  CHECK(!ranks.call(later, other));
  device::share_emulated(true);
  CHECK(!ranks.call(one, other));
  CHECK(one.is(16) && other.is(16) && later.is(10));
}

// Of two GPUs that this rank uses the peers reach one.
TEST(memory_of_other_devices_is_not_opened) {
  Two ranks;
  const Operand one(1), other(2);
  CHECK(ranks.call(one, other));
  const auto elsewhere = device::arena_of(device::kEmulated + 1).alloc(100);
  device::share_emulated(false);
  const Operand hidden(4, 3 * device::Arena::kSegmentBytes);  // for which all segments are listed anew
  CHECK(ranks.call(hidden, other));
  device::share_emulated(true);
  CHECK(ranks.call(one, other));
  CHECK(hidden.is(7) && one.is(10) && other.is(10));
}

TEST(memory_that_cannot_be_shown_is_copied) {
  Two ranks;
  const Operand one(1), other(2);
  CHECK(ranks.call(one, other));
  device::share_emulated(false);
  const Operand hidden(4, 3 * device::Arena::kSegmentBytes);
  device::share_emulated(true);
  CHECK(ranks.call(hidden, other));
  CHECK(hidden.is(7) && other.is(7));
}

Request gather_of(const Operand& one) {
  Request request = one.request();
  request.kind = Kind::kAllGather;
  request.row_elems = sizeof(float);
  request.out = nullptr;
  return request;
}

// A stray write of rank 1 has changed what it posted.
void expect_damaged(
    const std::function<void(BoardEntry::Post&)>& damage, const std::string& text,
    Request (*request_of)(const Operand&) = [](const Operand& one) { return one.request(); }) {
  auto world = connect_threads(2, test_settings());
  const Operand ones[2] = {Operand(1), Operand(2)};
  on_threads(2, [&](int rank) { reduce(*world[static_cast<size_t>(rank)], ones[rank].request()); });
  BoardEntry& posts = world[0]->members().window->board(1);
  const auto newest = [&]() -> BoardEntry::Record& {
    return posts.record[posts.record[1].ticket > posts.record[0].ticket];
  };
  const uint64_t before = newest().ticket;
  const auto other = world[1]->submit(request_of(ones[1]));
  while (newest().ticket == before) world[1]->poll(*other);
  damage(newest().post);
  CHECK_THROWS(reduce(*world[0], request_of(ones[0])), TransportError, text);
  CHECK_THROWS(world[1]->wait(*other), Error, "damaged");
  for (const auto& rank : world) rank->fail("the test is over");
}

TEST(places_that_a_rank_cannot_have_meant) {
  constexpr uint64_t kSegment = uint64_t{200} << 48, kFar = uint64_t{1} << 40, kLong = Window::kUnmapped >> 16;
  for (const uint64_t damage : {kSegment, kFar, kLong}) {
    expect_damaged([&](BoardEntry::Post& post) { post.offset_in = damage; }, "rank 1 ");
    expect_damaged([&](BoardEntry::Post& post) { post.offset_out = damage; }, "rank 1 ");
  }
}

TEST(rows_that_a_rank_cannot_have) {
  for (const uint64_t rows : {uint64_t{1} << 62, (uint64_t{1} << 47) - 1}) {
    expect_damaged([&](BoardEntry::Post& post) { post.offset_out = rows; },
                   "rank 1 tells of " + std::to_string(rows) + " rows of 4 bytes", gather_of);
  }
  constexpr uint64_t kFar = uint64_t{1} << 40;
  expect_damaged([&](BoardEntry::Post& post) { post.offset_out = kFar; },
                 " posted " + std::to_string(4 * kFar) + " bytes", gather_of);
  expect_damaged([&](BoardEntry::Post& post) { post.offset_in = uint64_t{200} << 48; }, "rank 1 ", gather_of);
}

TEST(segments_that_a_rank_cannot_have) {
  for (const size_t segments : {size_t{1025}, (size_t{1} << DeviceWord::kCountBits) - 1}) {
    expect_damaged(
        [&](BoardEntry::Post& post) {
          DeviceWord said = DeviceWord::of(post.value);
          said.segments = segments;
          post.value = said.word();
        },
        "rank 1 lists " + std::to_string(segments) + " segments of memory on devices");
  }
}

TEST_MAIN
