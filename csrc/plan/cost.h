// How long a collective takes, predicted by simulating its schedules: the algorithm is written once, as data, and its
// cost follows from it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "base/settings.h"
#include "plan/schedule.h"
#include "plan/topology.h"

namespace dcoll::plan {

inline constexpr uint64_t kDefaultSliceBytes = kEagerSliceKb << 10;  // as between nodes

// Microseconds until the last rank is done. `bytes`: the larger of a rank's input and output. slice_bytes: the longest
// message. A rank is one CPU that serves its channels in the order in which their steps become possible. lanes: how
// many rounds the engine has under way on each channel. The call is taken for one of many in a row, as in training:
// reserves of the links (topology.h) are there for its first bytes, and cannot grow faster than the links carry.
// before_us: of each call, before its first message; the links may still carry those of the call before. Throws
// ArgumentError when topology and schedules differ in the number of ranks, or the schedules deadlock.
double predict_us(std::span<const Schedule> all_ranks, uint64_t bytes, const Topology& topology,
                  uint64_t slice_bytes = kDefaultSliceBytes, uint32_t lanes = 1, double before_us = 0);

// ---- what simulations share (cost.cc, simulate.cc) ----

// One direction of a link: a token bucket, kept as the moment at which its reserve will be whole again (GCRA).
struct Direction {
  double whole_at = 0.0;

  // When a message that could pass at `now` begins to.
  double pass(double now, double cost_us, double reserve_us) {
    const double begin = std::max(now, whole_at - reserve_us);
    whole_at = std::max(whole_at, now) + cost_us;
    return begin;
  }
};

// run(rounds), a number of microseconds. Once the pipeline is full every further round adds the same time: beyond five
// per lane, it is the difference between that many and two, both run.
template <typename Run>
double extrapolate(uint64_t rounds, uint32_t lanes, const Run& run) {
  const uint32_t few = 2 * lanes, many = 5 * lanes;
  if (rounds <= many) return run(static_cast<uint32_t>(rounds));
  const double at_many = run(many);
  const double pace = (at_many - run(few)) / (many - few);
  return at_many + static_cast<double>(rounds - many) * pace;
}

}  // namespace dcoll::plan
