#include "engine/levels/node_map.h"

#include <algorithm>
#include <map>

namespace dcoll {

NodeMap NodeMap::of(const std::vector<int>& memory_of_rank, int rank) {
  NodeMap map;
  std::map<int, int> nodes;  // number of a memory -> node
  for (int r = 0; r < static_cast<int>(memory_of_rank.size()); ++r) {
    const auto [found, added] = nodes.try_emplace(memory_of_rank[r], static_cast<int>(map.ranks.size()));
    if (added) map.ranks.emplace_back();
    std::vector<int>& members = map.ranks[found->second];
    if (r == rank) {
      map.node = found->second;
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
