#include <array>

#include "base/error.h"
#include "plan/algorithms.h"

namespace dcoll::plan {
namespace {

using enum Collective;

constexpr std::array kCollectives = {kAllReduce, kReduceScatter, kAllGather, kBroadcast, kAllToAll};

// Two channels: while one waits for its neighbour, the other reduces. The others keep one chunk per rank, so that a
// chunk is what a rank owns.
Schedule build_ring_all_reduce(uint32_t n, uint32_t rank, uint32_t) { return ring_all_reduce(n, rank, 2); }
Schedule build_ring_reduce_scatter(uint32_t n, uint32_t rank, uint32_t) { return ring_reduce_scatter(n, rank); }
Schedule build_ring_all_gather(uint32_t n, uint32_t rank, uint32_t) { return ring_all_gather(n, rank); }
Schedule build_tree_all_reduce(uint32_t n, uint32_t rank, uint32_t) { return tree_all_reduce(n, rank); }
Schedule build_direct_all_reduce(uint32_t n, uint32_t rank, uint32_t) { return direct_all_reduce(n, rank); }
Schedule build_pairwise_all_to_all(uint32_t n, uint32_t rank, uint32_t) { return pairwise_all_to_all(n, rank); }

constexpr std::array kAlgorithms = {
    Algorithm{kAllReduce, "ring", "least bytes, one peer each way: large buffers, any network", build_ring_all_reduce},
    Algorithm{kAllReduce, "tree", "double binary tree, O(log n) hops at full bandwidth: small and medium, many ranks",
              build_tree_all_reduce},
    Algorithm{kAllReduce, "direct", "everyone to everyone, two hops, sums in rank order: few ranks, fast links",
              build_direct_all_reduce},
    Algorithm{kReduceScatter, "ring", "least bytes, one peer each way", build_ring_reduce_scatter},
    Algorithm{kAllGather, "ring", "least bytes, one peer each way", build_ring_all_gather},
    Algorithm{kBroadcast, "tree", "binary tree, O(log n) hops, rounds pipelined down the tree", tree_broadcast},
    Algorithm{kAllToAll, "pairwise", "one partner at a time each way, no hot spots", build_pairwise_all_to_all},
};

}  // namespace

std::string_view collective_name(Collective collective) {
  switch (collective) {
    case kAllReduce:
      return "all_reduce";
    case kReduceScatter:
      return "reduce_scatter";
    case kAllGather:
      return "all_gather";
    case kBroadcast:
      return "broadcast";
    case kAllToAll:
      return "all_to_all";
  }
  return "";  // unreachable: every enumerator is handled above
}

Collective parse_collective(std::string_view name) {
  std::string known;
  for (const Collective collective : kCollectives) {
    if (collective_name(collective) == name) return collective;
    known += (known.empty() ? "" : ", ") + std::string(collective_name(collective));
  }
  throw ArgumentError("no collective is called '" + std::string(name) + "': use one of " + known);
}

std::span<const Algorithm> algorithms() { return kAlgorithms; }

const Algorithm* find_algorithm(Collective collective, std::string_view name) {
  for (const Algorithm& algorithm : kAlgorithms) {
    if (algorithm.collective == collective && algorithm.name == name) return &algorithm;
  }
  return nullptr;
}

std::vector<Schedule> build_all(const Algorithm& algorithm, uint32_t n, uint32_t root) {
  std::vector<Schedule> schedules;
  schedules.reserve(n);
  for (uint32_t rank = 0; rank < n; ++rank) schedules.push_back(algorithm.build(n, rank, root));
  return schedules;
}

std::string algorithm_names(Collective collective) {
  std::string names;
  for (const Algorithm& algorithm : kAlgorithms) {
    if (algorithm.collective == collective) names += (names.empty() ? "" : ", ") + std::string(algorithm.name);
  }
  return names;
}

}  // namespace dcoll::plan
