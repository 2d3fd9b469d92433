#include "engine/levels/node_map.h"

#include <algorithm>

#include "base/ranks_text.h"

namespace dcoll {

NodeMap NodeMap::of(const std::vector<int>& memory_of_rank, int rank) {
  NodeMap map;
  const std::vector<int> nodes = numbered(memory_of_rank);
  for (int r = 0; r < static_cast<int>(nodes.size()); ++r) {
    if (nodes[r] == map.num_nodes()) map.ranks.emplace_back();
    std::vector<int>& members = map.ranks[nodes[r]];
    if (r == rank) {
      map.node = nodes[r];
      map.local_rank = static_cast<int>(members.size());
    }
    members.push_back(r);
  }
  size_t least = memory_of_rank.size();
  for (const auto& members : map.ranks) least = std::min(least, members.size());
  map.carriers = static_cast<int>(std::max<size_t>(1, least));
  return map;
}

std::vector<int> NodeMap::carriers_of(int carrier) const {
  std::vector<int> found;
  for (const auto& members : ranks) found.push_back(members[carrier]);
  return found;
}

bool NodeMap::has_two_levels() const {
  return ranks.size() > 1 && std::any_of(ranks.begin(), ranks.end(), [](const auto& node) { return node.size() > 1; });
}

}  // namespace dcoll
