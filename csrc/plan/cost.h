// How long a collective takes, predicted by simulating its schedules: the algorithm is written once, as data, and its
// cost follows from it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

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

// Where a rank sits. Its messages to other nodes pass a card of its node's.
struct Seat {
  uint32_t node = 0, card = 0, rack = 0;
};

// Ranks 0 .. simulated-1 are simulated; rank r acts as rank r % simulated, whose card and uplink it has.
struct Machine {
  const Constants& constants;
  std::vector<Seat> seats;  // by rank
  uint32_t simulated = 0;
  double flows_per_card = 1;
  double oversubscription = 1, cards_per_rack = 1;  // an uplink carries what its cards do, divided by this
  double spine_alpha_us = 0;                        // what a message to another rack takes longer
  double compression = 1, encode_us_per_byte = 0, decode_us_per_byte = 0;  // of what passes cards
};

struct Run {
  double us = 0;
  uint64_t events = 0;  // steps executed
};

// As predict_us(). schedules: of all ranks; or one of a rank that stands for all, whose peers are then shifted.
Run simulate_on(const Machine& machine, std::span<const Schedule> schedules, double bytes, uint64_t slice_bytes,
                uint32_t lanes, double before_us = 0);

}  // namespace dcoll::plan
