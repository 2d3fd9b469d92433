// What the all-reduce on two levels (engine/hierarchical_all_reduce.h) is predicted to cost. Its upper level is a
// Schedule and simulated as one; the lower level, in memory that all ranks of a node have mapped, is passes of the CPU.
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

// The carriers of one slice as a topology of one rank per node; the node's network is shared by `carriers` slices.
Topology between_nodes(const Topology& topology, uint32_t nodes, uint32_t carriers);

// Up to `riding_bytes` ride on the agreement; piece_bytes: the unit of overlap (engine/hierarchy.h has both). Nodes are
// the topology's, with at least two of them.
HierarchicalCost predict_hierarchical(uint64_t bytes, const Topology& topology, uint64_t slice_bytes,
                                      uint64_t piece_bytes, uint64_t riding_bytes);

}  // namespace dcoll::plan
