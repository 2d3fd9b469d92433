// What the all-reduce on two levels (engine/levels/hierarchical_all_reduce.h) is predicted to cost. Its upper level is
// a Schedule and simulated as one; the lower level, in memory that all ranks of a node have mapped, is passes of the
// CPU.
#pragma once

#include <cstdint>
#include <string>

#include "plan/algorithms.h"
#include "plan/cost.h"
#include "plan/select.h"
#include "plan/topology.h"

namespace dcoll::plan {

struct HierarchicalCost {
  double agreement_us = 0;  // the handshake: the board of the node, and one exchange between leaders
  double in_node_us = 0;    // filling, reducing and taking, of the piece that overlaps with nothing
  double between_us = 0;    // the slices between nodes; not less than the passes in the node, which overlap with it
  const Algorithm* between = nullptr;  // null where everything rides on the agreement
  std::string why;                     // one line: the stages

  double total_us() const { return agreement_us + in_node_us + between_us; }
};

// Up to so many nodes exchange small operands each with each, in one step.
inline constexpr uint32_t kMaxDirectNodes = 8;
// A small operand is no longer than its slot in the node's memory.
inline constexpr uint64_t kSmallSlotBytes = uint64_t{16} << 10;

// What a large buffer is cut into, at the most, so that the steps in the node overlap with those between nodes.
// little_memory: the nodes' arenas were made so small that pieces must be small too.
uint64_t most_piece_bytes(uint32_t nodes, uint32_t carriers, uint64_t slice_bytes, bool little_memory = false);
// What a buffer of `bytes` is cut into. `most`: most_piece_bytes().
uint64_t piece_bytes(uint64_t bytes, uint64_t most, const LinkModel& network, uint64_t slice_bytes);

// How many ranks of a node carry slices of a buffer of `bytes`, of the `most` that may.
uint32_t carriers_for(uint64_t bytes, uint32_t most, bool shared_cores);

// Buffers of up to so many bytes ride on the agreement, which every node sends to every other one.
uint64_t riding_bytes(uint32_t nodes, uint64_t longest_message);

// The carriers of one slice as a topology of one rank per node; the node's network is shared by `carriers` slices.
Topology between_nodes(const Topology& topology, uint32_t nodes, uint32_t carriers);

// The all-reduce of one slice, of slice_of_bytes, between its carriers.
Choice select_between(uint64_t slice_of_bytes, const Topology& topology, uint32_t nodes, uint32_t carriers,
                      uint64_t slice_bytes);

// Nodes are the topology's, with at least two of them.
HierarchicalCost predict_hierarchical(uint64_t bytes, const Topology& topology, uint64_t slice_bytes);

}  // namespace dcoll::plan
