// The last operation that a rank finished, where its peers can read it though the rank itself is stopped: in its
// region. Written after every operation, so it is a few plain stores to a line that nobody reads. Looking at the clock
// would take longer than that: the time is noted only of operations that took long anyway.
#pragma once

#include <string>

#include "engine/operation.h"
#include "engine/pull_call.h"
#include "transport/window.h"

namespace dcoll {

// By the owner, one thread at a time. `order`: of all that the rank did, in whatever communicator; from 1.
inline constexpr uint64_t kNoTime = 0;
uint64_t footprint_time();
void leave_footprint(Footprint& footprint, uint64_t order, const Request& request, uint64_t time);
void leave_footprint(Footprint& footprint, uint64_t order, const PullCall& call);
void leave_named_footprint(Footprint& footprint, uint64_t order, const ReduceCall& call);

// The words: order; kind, dtype, op, length of the name; count; when; elements per row and root; the name, cut off.
inline constexpr size_t kNameWord = 5;
constexpr uint64_t footprint_kind(Kind kind, DType dtype, ReduceOp op, size_t name_bytes) {
  return static_cast<uint64_t>(kind) | static_cast<uint64_t>(dtype) << 8 | static_cast<uint64_t>(op) << 16 |
         uint64_t{name_bytes} << 24;
}

// Here for speed: a call of 4 bytes takes less than a microsecond.
inline void leave_footprint(Footprint& footprint, uint64_t order, const ReduceCall& call) {
  if (!call.name.empty()) return leave_named_footprint(footprint, order, call);
  const uint64_t version = footprint.version.load(std::memory_order_relaxed);
  footprint.version.store(version + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  footprint.word[0].store(order, std::memory_order_relaxed);
  footprint.word[1].store(footprint_kind(Kind::kAllReduce, call.dtype, call.op, 0), std::memory_order_relaxed);
  footprint.word[2].store(call.count, std::memory_order_relaxed);
  footprint.word[3].store(kNoTime, std::memory_order_relaxed);
  footprint.version.store(version + 2, std::memory_order_release);
}

// Of two footprints of a rank, the later one.
const Footprint& later(const Footprint& a, const Footprint& b);

// "finished barrier 61 s ago", "finished barrier" where the time is not known, or "has finished no operation yet".
std::string read_footprint(const Footprint& footprint);

}  // namespace dcoll
