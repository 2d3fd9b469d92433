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
  uint64_t slice_bytes;  // the longest message that is best for it
};

struct Choice {
  const Algorithm* algorithm;         // never null
  uint64_t slice_bytes;               // its longest message
  std::string why;                    // one line: the numbers that decided
  std::vector<Candidate> candidates;  // the chosen one, then by time
};

inline constexpr uint32_t kMaxDirectRanks = 128;
inline constexpr uint32_t kMaxTriedRanks = 16;

// A pure function of its arguments, so ranks that call it with the same ones agree without talking. Simulates every
// candidate: microseconds to milliseconds for tens of ranks, so keep the result for sizes of the same order. With more
// than kMaxDirectRanks ranks, algorithms in which everybody talks to everybody are not considered if there is another.
// slice_bytes: the longest message there may be. Between nodes, of up to kMaxTriedRanks ranks, halves and quarters of
// it are tried as well: shorter messages fill the pipeline sooner, longer ones cost less each.
//
// Between nodes the handshake (plan/agreement.h) is part of the time, and a small all-reduce is one with it: that is
// the candidate of Family::kDirect then.
Choice select(Collective collective, uint64_t bytes, const Topology& topology,
              uint64_t slice_bytes = kDefaultSliceBytes);

// The same for a part of a collective, which all ranks have agreed on already.
Choice select_part(Collective collective, uint64_t bytes, const Topology& topology, uint64_t slice_bytes);

}  // namespace dcoll::plan
