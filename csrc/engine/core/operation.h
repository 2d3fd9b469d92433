// One operation: a call of a collective, from submission to result.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "engine/core/call.h"
#include "engine/core/memory.h"
#include "engine/core/task.h"
#include "engine/core/timeline_record.h"

namespace dcoll {

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
  bool patient = false;          // a farewell that nobody waits for (Communicator::leave)
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
  bool encoded = false;                       // allreduce: its encoding was used
  bool in_use = false;  // it failed, and a message half there may still move from or to the caller's memory
  std::atomic<bool> done{false};

  // Whether the memory is the caller's again.
  bool released() const { return done.load(std::memory_order_acquire) && !in_use; }

  // Where the result of a ragged collective goes, now that its size is known.
  std::byte* place_output(size_t bytes) {
    if (request.out != nullptr && bytes == request.out_bytes) return static_cast<std::byte*>(request.out);
    output = Memory::uninitialized(bytes);
    return output->data();
  }
};

}  // namespace dcoll
