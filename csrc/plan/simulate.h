// The cost model of cost.h for clusters of thousands of ranks, in memory and time that do not grow with ranks x steps.
// It runs the same schedules under the same accounting, and knows more of the network: several cards per node, racks
// behind an uplink that is narrower than what hangs below it, and messages that are compressed on their way.
//
// Two ways, the same results where both apply (tests/plan/simulate_test.cc):
//   every rank  all schedules are built and every step is an event. For few ranks, and for algorithms whose schedules
//               are short (trees, recursive doubling): O(ranks log ranks) events.
//   one group   in rings, halving-doubling and pairwise exchange every rank does what its neighbours do, shifted by one
//               place. Groups of ranks that sit alike (nodes; racks, where there are several) then act alike, and one
//               of them is simulated: a message to the next group is one that the previous group sends us. One schedule
//               is stored, so memory is O(steps of a rank), and a ring of 16,384 ranks costs what one node of it does.
#pragma once

#include <cstdint>

#include "plan/algorithms.h"
#include "plan/cost.h"
#include "plan/topology.h"

namespace dcoll::plan {

// Ranks in blocks: node k has ranks k * ranks_per_node and so on; rack j likewise has nodes.
struct Cluster {
  uint32_t nodes = 1;
  uint32_t ranks_per_node = 1;
  uint32_t rails = 1;           // network cards per node; local rank l talks through card l % rails
  uint32_t nodes_per_rack = 0;  // 0: all behind one switch
  double oversubscription = 1;  // the uplink of a rack carries what its cards do, divided by this
  double spine_alpha_us = 0;    // what a message to another rack takes longer
  // On links between nodes: messages are `compression` times shorter, and each side spends this much on a byte of them.
  double compression = 1;
  double encode_us_per_byte = 0, decode_us_per_byte = 0;
  Constants constants;  // the link models and gamma

  uint32_t num_ranks() const { return nodes * ranks_per_node; }
};

enum class Method : uint8_t { kAuto, kEveryRank, kOneGroup };

struct SimulateOptions {
  uint64_t slice_bytes = kDefaultSliceBytes;
  uint32_t lanes = 1;  // rounds the engine has under way on each channel
  Method method = Method::kAuto;
  // kAuto takes one group, where ranks act alike, beyond so many steps of all ranks; nothing simulates more than the
  // most.
  uint64_t few_steps = 200'000, most_steps = 3'000'000;
};

struct Simulated {
  double us = 0;
  Method method = Method::kEveryRank;
  uint64_t events = 0;  // steps executed
};

// Throws ArgumentError where the algorithm cannot be simulated for so many ranks, and says what can.
Simulated simulate(const Algorithm& algorithm, const Cluster& cluster, uint64_t bytes,
                   const SimulateOptions& options = {});

// All-reduce in three phases, one after the other: reduce-scatter in the node, `inner` between the ranks of one number
// of all nodes, each on its share and all at once, all-gather in the node. The flows of a node share its cards evenly.
Simulated simulate_hierarchical(const Algorithm& inner, const Cluster& cluster, uint64_t bytes,
                                const SimulateOptions& options = {});

}  // namespace dcoll::plan
