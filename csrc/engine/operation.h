// One call of a collective, from submission to result.
#pragma once

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/types.h"
#include "engine/dims.h"
#include "engine/memory.h"
#include "engine/task.h"
#include "engine/timeline_record.h"
#include "kernels/pack.h"

namespace dcoll {

enum class Kind : uint8_t { kAllReduce, kBroadcast, kAllGather, kReduceScatter, kAllToAll, kBarrier, kShutdown, kJoin };
std::string_view kind_name(Kind kind);

// What describe() says of a Request with a refusal begins with this.
inline constexpr std::string_view kCouldNot = "could not make its call: ";

// The factor of a reduction's results: an average is a sum that is divided.
inline double final_scale(ReduceOp op, double postscale, int size) {
  return op == ReduceOp::kAverage ? postscale / size : postscale;
}

// Whether the elements can be multiplied by it.
inline bool can_scale(DType dtype, double factor) {
  return factor == 1.0 || is_floating(dtype) || (dtype != DType::kBool && std::isfinite(factor));
}

// The arguments of an all-reduce, without anything that needs allocating: what a synchronous call starts from.
struct ReduceCall {
  const void* in = nullptr;
  void* out = nullptr;  // may equal in
  size_t count = 0;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1.0;
  double postscale = 1.0;
  std::string_view algo{};  // as in Request
  std::string_view name{};
  // An operand packed into mapped memory; of the same call it is so on every rank, and so part of what ranks compare.
  bool packed = false;
  std::span<const kernels::Segment> tensors{};  // as in ReduceJob; {}, or what own_slice() was asked about
  bool into_tensors = false;                    // as in ReduceJob
  Dims dims{};                                  // of the operand

  // Whether Request::validate certainly has nothing against it.
  bool plainly_valid() const {
    return op != ReduceOp::kAdasum && (algo.empty() || algo == "auto" || algo == "direct" || algo == "hierarchical") &&
           can_scale(dtype, prescale) && can_scale(dtype, postscale) &&
           (dtype != DType::kBool || op != ReduceOp::kAverage);
  }
  uint64_t fingerprint() const;  // equals Request's
};

// What the caller asked for. The memory belongs to the caller and must live until the operation is done.
struct Request {
  Kind kind = Kind::kBarrier;
  const void* in = nullptr;
  void* out = nullptr;   // allreduce, broadcast (the buffer), reducescatter; allgather, alltoall: see out_bytes
  size_t count = 0;      // allreduce: elements. Others: rows
  size_t row_elems = 1;  // reducescatter: elements per row. Byte collectives: bytes per row
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  double prescale = 1.0;
  double postscale = 1.0;
  std::string algo{};  // "" = as configured
  std::string name{};  // part of what ranks compare; "" is fine
  // alltoall: rows for each rank. reducescatter: elements for each rank; {} is rows shared evenly. Adasum: elements of
  // each tensor; {} is one tensor
  std::vector<size_t> splits{};
  uint64_t stands_for = 0;  // a joined rank's part in what others called: their fingerprint
  std::string refusal{};    // barrier: this rank cannot make its next call, because of this; the others' fails
  size_t out_bytes = 0;     // allgather, alltoall: a result of just this size goes to `out`; else the core allocates
  std::string group{};      // of several tensors as one: what they are, compared as the name is
  int root_in_job = -1;     // what messages call the root; -1: by its number here
  bool packed = false;      // allreduce: as in ReduceCall, both
  std::span<const kernels::Segment> tensors{};
  bool into_tensors = false;
  std::vector<int64_t> dims{};  // of the operand (allreduce, broadcast) or of one of its rows (the others)

  static Request of(const ReduceCall& call);
  ReduceCall reduce_call() const;  // kind == kAllReduce; refers to this request's strings

  // So little that moving it takes no longer than telling another thread.
  bool is_small() const { return count * row_elems <= kSmall; }
  static constexpr size_t kSmall = size_t{16} << 10;

  // Throws ArgumentError for what can never work, before anything is sent.
  void validate(int size) const;
  // What must be the same on every rank.
  uint64_t fingerprint() const;
  size_t bytes() const;  // of the operand of this rank
  // "allreduce 'grad.3' (sum of 1024 float32)", for messages.
  std::string describe() const;
};

struct Operation {
  explicit Operation(Request r) : request(std::move(r)) {}
  Request request;
  std::shared_ptr<Memory> keep;  // the caller's memory, where the core owns it
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
  std::shared_ptr<Operation> next_abandoned;  // of the communicator's list: failing must not need memory
  bool in_use = false;  // it failed, and a message half there may still move from or to the caller's memory
  std::atomic<bool> done{false};

  // Whether the memory is the caller's again.
  bool released() const { return done.load(std::memory_order_acquire) && !in_use; }

  // Where the result of a ragged collective goes, now that its size is known.
  std::byte* place_output(size_t bytes);
};

}  // namespace dcoll
