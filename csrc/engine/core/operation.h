// One operation: a call of a collective, from submission to result.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "engine/core/call.h"
#include "engine/core/memory.h"
#include "engine/core/task.h"
#include "engine/core/timeline_record.h"

namespace dcoll {

// What describe() says of a Request with a refusal begins with this.
inline constexpr std::string_view kCouldNot = "could not make its call: ";

// A Call that owns what its views refer to, and what only queued operations have. Fields of a Call mean the same here.
struct Request {
  Kind kind = Kind::kBarrier;
  const void* in = nullptr;
  void* out = nullptr;
  size_t count = 0;
  size_t row_elems = 1;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  double prescale = 1.0;
  double postscale = 1.0;
  Algo algo{};
  Encoding encoding{};
  Feedback feedback{};
  std::string name{};
  std::vector<size_t> splits{};
  uint64_t stands_for = 0;  // a joined rank's part in what others called: their fingerprint
  std::string refusal{};    // barrier: this rank cannot make its next call, because of this; the others' fails
  size_t out_bytes = 0;
  bool skip_own = false;
  std::string group{};
  int root_in_job = -1;  // what messages call the root; -1: by its number here
  bool packed = false;
  std::span<const kernels::Segment> tensors{};
  bool into_tensors = false;
  std::vector<int64_t> dims{};
  int device = device::kHost;       // as in Call; submitted, `in` and `out` are then its copies in host memory
  device::Stream stream = nullptr;  // after which the memory may be read
  uint64_t tag = 0;  // send, recv: a point_key() (point.h); `root` is the peer or kAnySource, `count` bytes

  // Of an all-to-all without splits: rows shared evenly between the `size` ranks.
  static Request of(const Call& call, int size);
  Call call() const;  // refers to this

  // Throws ArgumentError for what can never work, before anything is sent.
  void validate(int size) const;
  // What must be the same on every rank.
  uint64_t fingerprint() const;
  // "allreduce 'grad.3' (sum of 1024 float32)", for messages.
  std::string describe() const;
};

class Staging;

struct Operation {
  explicit Operation(Request&& r) : request(std::move(r)) {}
  Request request;
  std::shared_ptr<Memory> keep;      // the caller's memory, where the core owns it
  std::shared_ptr<Staging> staging;  // of memory on a device
  Task task;
  bool by_name = false;
  std::string note{};  // join: what to log on a rank that others outlast
  bool started = false;
  bool counts_in_order = true;   // failed: the other ranks had a call in its place (line_up.h)
  Clock::time_point last_moved;  // before it started: when it was submitted
  size_t missing = 0;            // ranks waited for when the watchdog last looked
  // join: operations that this rank took part in while it was joined, in order and by name.
  uint64_t rounds = 0, named_rounds = 0;
  // DCOLL_STALL_CHECK_TIME has passed, and a rank has said so or will. Flags alone, under the drive lock or not.
  std::atomic<bool> stalled{false}, stall_told{false};
  std::string report;               // where this rank has said so. Drive lock
  std::atomic<uint64_t> waiter{0};  // the thread that waits for it, as Python numbers threads; a hint, relaxed
  Phases phases{false};             // for the timeline
  // Written before `done` is set (release), read after it was seen (acquire).
  std::exception_ptr error;
  std::shared_ptr<Memory> output;             // ragged collectives, unless the result went to request.out
  std::vector<int64_t> counts;                // rows received from each rank
  int source = -1;                            // recv: who sent it
  std::shared_ptr<Operation> next_abandoned;  // of the communicator's list: failing must not need memory
  bool in_use = false;  // it failed, and a message half there may still move from or to the caller's memory
  std::atomic<bool> done{false};

  // Whether the memory is the caller's again.
  bool released() const { return done.load(std::memory_order_acquire) && !in_use; }

  // Where the result of a ragged collective goes, now that its size is known.
  std::byte* place_output(size_t bytes);
};

}  // namespace dcoll
