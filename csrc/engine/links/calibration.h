// What messages cost on the machines of this job, measured in less than 200 ms: the constants of the cost model
// (plan/topology.h). Ranks are paired off, all pairs measure at once, both directions, through the transport that
// carries the collectives and polled as they are, so what is measured is what a schedule will see, the contention for
// shared cores and cards included. Everybody ends with rank 0's numbers, so that all ranks choose alike.
//
//   1. Inside the nodes, local ranks 0 and 1, 2 and 3, ...      ping-pong, stream
//   2. Between nodes, the first ranks of nodes 0 and 1, ...     ping-pong, stream
//   3. The first ranks of up to 3 nodes stream to rank 0 at once: what a crowd costs beyond its bytes
//   4. Rank 0 tells everybody.
//
// Before that all ranks make some handshakes (learn_constants): what they cost on shared cores follows from no link.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "engine/core/task.h"
#include "plan/schedule.h"
#include "plan/topology.h"
#include "transport/transport.h"

namespace dcoll {

struct CalibrationSite {
  Messages* transport = nullptr;
  const plan::Topology* topology = nullptr;
  size_t slice_bytes = 0;                           // the longest message of a schedule
  std::shared_ptr<const plan::Schedule> broadcast;  // from rank 0, over all ranks
};

// Measures; `result` holds the same numbers on every rank when the task is done, and must outlive it.
Task measure_constants(CalibrationSite site, plan::Constants& result);

// Rank 0's `data` for everybody.
Task tell_everybody(CalibrationSite site, std::span<std::byte> data);

}  // namespace dcoll
