// Which algorithm is fastest for this many bytes on this topology, by the cost model.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/algorithms.h"
#include "plan/cost.h"
#include "plan/topology.h"

namespace dcoll::plan {

struct Candidate {
  const Algorithm* algorithm;
  double predicted_us;
};

struct Choice {
  const Algorithm* algorithm;         // never null
  std::string why;                    // one line: the numbers that decided
  std::vector<Candidate> candidates;  // fastest first
};

// A pure function of its arguments, so ranks that call it with the same ones agree without talking. Simulates every
// candidate: microseconds to milliseconds for tens of ranks, so keep the result for sizes of the same order. With more
// than kMaxDirectRanks ranks, algorithms in which everybody talks to everybody are not considered if there is another.
inline constexpr uint32_t kMaxDirectRanks = 128;
Choice select(Collective collective, uint64_t bytes, const Topology& topology,
              uint64_t slice_bytes = kDefaultSliceBytes);

}  // namespace dcoll::plan
