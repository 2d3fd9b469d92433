#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/types.h"
#include "plan/algorithms.h"

namespace dcoll::plan {
namespace {

using enum Collective;
using enum Family;

constexpr auto kCollectives =
    std::to_array<std::string_view>({"all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"});
static_assert(static_cast<size_t>(kAllToAll) + 1 == kCollectives.size());

// Two channels: while one waits for its neighbour, the other reduces. The others keep one chunk per rank, so that a
// chunk is what a rank owns.
Schedule ring_2(uint32_t n, uint32_t rank, uint32_t) { return ring_all_reduce(n, rank, 2); }
Schedule halving_doubling_2(uint32_t n, uint32_t rank, uint32_t) { return halving_doubling_all_reduce(n, rank, 2); }
// A builder that has no root.
template <Schedule (*kBuild)(uint32_t, uint32_t)>
Schedule any_root(uint32_t n, uint32_t rank, uint32_t) {
  return kBuild(n, rank);
}

// The last number is of a rank that acts as all do: not the hole of the ring (ring.cc).
constexpr std::array kAlgorithms = {
    Algorithm{kAllReduce, kRing, "ring", "least bytes, one peer each way: large buffers, any network", ring_2, 1},
    Algorithm{kAllReduce, kTree, "tree",
              "double binary tree, O(log n) hops at full bandwidth: small and medium, many ranks",
              any_root<tree_all_reduce>},
    Algorithm{kAllReduce, kHalvingDoubling, "halving_doubling",
              "least bytes in 2 log n exchanges: medium and large buffers, many ranks", halving_doubling_2, 0},
    Algorithm{kAllReduce, kRecursiveDoubling, "recursive_doubling",
              "log n exchanges of the whole buffer, fewest hops: small buffers",
              any_root<recursive_doubling_all_reduce>},
    Algorithm{kAllReduce, kDirect, "direct",
              "everyone to everyone, two hops, sums in rank order: few ranks, fast links", any_root<direct_all_reduce>},
    Algorithm{kReduceScatter, kRing, "ring", "least bytes, one peer each way: large buffers",
              any_root<ring_reduce_scatter>, 1},
    Algorithm{kReduceScatter, kRecursiveHalving, "recursive_halving",
              "least bytes in log n exchanges: medium buffers, many ranks", any_root<recursive_halving_reduce_scatter>,
              0},
    Algorithm{kReduceScatter, kDirect, "direct",
              "everyone to everyone, one hop, sums in rank order: few ranks, fast links",
              any_root<direct_reduce_scatter>},
    Algorithm{kAllGather, kRing, "ring", "least bytes, one peer each way: large buffers", any_root<ring_all_gather>, 1},
    Algorithm{kAllGather, kBruck, "bruck", "least bytes in log n exchanges: small and medium buffers, many ranks",
              any_root<bruck_all_gather>, 0},
    Algorithm{kAllGather, kDirect, "direct", "everyone to everyone, one hop: few ranks, fast links",
              any_root<direct_all_gather>, 0},
    Algorithm{kBroadcast, kTree, "tree", "binary tree, O(log n) hops, rounds pipelined down the tree", tree_broadcast},
    Algorithm{kBroadcast, kBinomial, "binomial", "binomial tree, fewest hops: small buffers", binomial_broadcast},
    Algorithm{kBroadcast, kChain, "chain", "slices down a chain, every rank sends once: large buffers",
              chain_broadcast},
    Algorithm{kAllToAll, kPairwise, "pairwise", "one partner at a time each way, no hot spots",
              any_root<pairwise_all_to_all>, 0},
    Algorithm{kAllToAll, kDirect, "direct", "everything at once, one hop: small blocks", any_root<direct_all_to_all>,
              0},
};

}  // namespace

std::string_view collective_name(Collective collective) { return name_in(kCollectives, collective); }

Collective parse_collective(std::string_view name) {
  const auto found = std::ranges::find(kCollectives, name);
  if (found != kCollectives.end()) return static_cast<Collective>(found - kCollectives.begin());
  std::string known;
  for (const std::string_view one : kCollectives) known += (known.empty() ? "" : ", ") + std::string(one);
  throw ArgumentError("no collective is called '" + std::string(name) + "': use one of " + known);
}

std::span<const Algorithm> algorithms() { return kAlgorithms; }

const Algorithm* find_algorithm(Collective collective, std::string_view name) {
  for (const Algorithm& algorithm : kAlgorithms) {
    if (algorithm.collective == collective && algorithm.name == name) return &algorithm;
  }
  return nullptr;
}

std::string algorithm_names(Collective collective) {
  std::string names;
  for (const Algorithm& algorithm : kAlgorithms) {
    if (algorithm.collective == collective) names += (names.empty() ? "" : ", ") + std::string(algorithm.name);
  }
  return names;
}

const Algorithm& algorithm_of(Collective collective, Family family) {
  return *std::ranges::find_if(kAlgorithms, [&](const Algorithm& algorithm) {
    return algorithm.collective == collective && algorithm.family == family;
  });
}

const Algorithm& algorithm_named(Collective collective, std::string_view name) {
  if (const Algorithm* found = find_algorithm(collective, name)) return *found;
  throw ArgumentError("no algorithm for " + std::string(collective_name(collective)) + " is called '" +
                      std::string(name) + "': use one of " + algorithm_names(collective));
}

std::vector<Schedule> build_all(const Algorithm& algorithm, uint32_t n, uint32_t root) {
  std::vector<Schedule> schedules;
  schedules.reserve(n);
  for (uint32_t rank = 0; rank < n; ++rank) schedules.push_back(algorithm.build(n, rank, root));
  return schedules;
}

}  // namespace dcoll::plan
