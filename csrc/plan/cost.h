// How long a collective takes, predicted by simulating its schedules: the algorithm is written once, as data, and its
// cost follows from it.
#pragma once

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

// What one rank posts to others, in units of the buffer: 2(n-1)/n for a ring all-reduce.
double sent_share(const Schedule& schedule);

}  // namespace dcoll::plan
