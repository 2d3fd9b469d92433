// Who shares memory with whom: the two levels of a communicator over several nodes.
#pragma once

#include <vector>

namespace dcoll {

// A node here is a set of ranks that have all mapped each other's memory. Ranks of one machine that could not (separate
// containers) are nodes of one rank each.
struct NodeMap {
  std::vector<std::vector<int>> ranks;  // per node: its ranks, ascending. Nodes are ordered by their lowest rank
  int node = 0;                         // of this rank
  int local_rank = 0;                   // its place in its node

  // How many slices a buffer is cut into between nodes; local rank j < carriers carries slice j of every node. The size
  // of the smallest node: then a slice has exactly one carrier per node, so the carriers of a slice are a communicator
  // of their own, with nothing shared between two of them. More slices would not make the smallest node's ranks, which
  // carry the same bytes as everybody's, any faster.
  int carriers = 1;

  // Ranks with equal numbers have mapped each other.
  static NodeMap of(const std::vector<int>& memory_of_rank, int rank);

  int num_nodes() const { return static_cast<int>(ranks.size()); }
  int local_size() const { return static_cast<int>(ranks[node].size()); }
  int rank_of(int local) const { return ranks[node][local]; }
  // The ranks that carry slice `carrier`, by node.
  std::vector<int> carriers_of(int carrier) const;
  // More than one node, and more than one rank on any of them.
  bool has_two_levels() const;
};

}  // namespace dcoll
