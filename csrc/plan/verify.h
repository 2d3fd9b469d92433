// The proof that a collective's schedules are right, by symbolic execution: every slice holds an expression instead of
// numbers, all ranks run against bounded FIFOs, and what is left in the outputs is compared with what the collective
// promises. Found, with rank, channel and step named:
//   - deadlock (who waits for what), messages nobody receives, peers, chunks or buffers that do not exist
//   - wrong results: a contribution missing, taken twice, or of another chunk or round; reading what was never written
//   - drift: two ranks whose results are different floating-point expressions, though mathematically equal
//   - a missing, repeated, early or superfluous `finalize`, messages of other chunks than expected
//   - data races between channels of a rank, and writes to memory a peer may still be reading (zero copy)
//
// Why a few interleavings suffice: a channel is a sequential process that reads and writes fixed FIFOs, so if channels
// share no memory unordered (which the vector clocks of memory_order.cc establish), the values, and whether the bounded
// FIFOs deadlock, do not depend on the order in which channels advance (G. Kahn, "The semantics of a simple language
// for parallel programming", IFIP 1974). Several orders are run all the same, so that the argument itself is tested.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "plan/algorithms.h"

namespace dcoll::plan {

struct VerifyOptions {
  uint32_t slot_depth = 1;  // messages in flight per (sender, receiver, channel)
  uint32_t rounds = 2;      // 2 or more let lanes run ahead and FIFOs mix up rounds, if they can
  bool in_place =
      false;          // input and output are the same memory (reduce-scatter, all-gather: the rank's own block of it)
  uint32_t root = 0;  // broadcast only
  bool rank_order = false;  // also demand ((x0 op x1) op x2) op ... exactly: what a kernel over mapped memory computes
};

struct VerifyResult {
  std::string message;  // empty: the schedules are right
  explicit operator bool() const { return message.empty(); }
};

// all_ranks[r] is rank r's schedule.
VerifyResult verify(std::span<const Schedule> all_ranks, Collective collective, const VerifyOptions& options = {});

}  // namespace dcoll::plan
