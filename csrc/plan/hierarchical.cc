#include "plan/hierarchical.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <numeric>

#include "base/error.h"
#include "plan/describe.h"

namespace dcoll::plan {
namespace {

constexpr double kPasses = 3;  // fill, reduce, take

std::string explain(const HierarchicalCost& cost, uint64_t bytes, size_t nodes, uint32_t ranks) {
  char text[192];
  std::snprintf(text, sizeof text,
                "hierarchical: %.1f us predicted for %s on %u ranks of %zu nodes (agreement %.1f, in the node "
                "%.1f, between nodes %.1f",
                cost.total_us(), in_words(bytes).c_str(), ranks, nodes, cost.agreement_us, cost.in_node_us,
                cost.between_us);
  return text + (cost.between != nullptr ? " by " + std::string(cost.between->name) : std::string()) + ")";
}

}  // namespace

// A ring between p nodes with two channels cuts a carrier's slice of a piece into 2p chunks; so long that each is one
// message. Longer pieces would overlap less, shorter ones send shorter messages.
uint64_t most_piece_bytes(uint32_t nodes, uint32_t carriers, uint64_t slice_bytes, bool little_memory) {
  const uint64_t most = little_memory ? uint64_t{512} << 10 : uint64_t{8} << 20;
  return std::min(uint64_t{2} * carriers * nodes * slice_bytes, most);
}

// Half as long where a message's time on the wire is many times what it costs the CPU and pieces are few, so that the
// first and the last, which overlap with less, are a good part of the whole. Measured on 4 hosts of 2 ranks at 1
// Gbit/s: 2 % less time at 4 MiB, 1 % at 16 MiB, none at 64 MiB, for up to 5 % more CPU; on 2 hosts at 10 Gbit/s, where
// the CPU is the limit, no difference.
uint64_t piece_bytes(uint64_t bytes, uint64_t most, const LinkModel& network, uint64_t slice_bytes) {
  constexpr double kManyTimes = 16;
  constexpr uint64_t kFewPieces = 32;
  const double wire_us = static_cast<double>(slice_bytes) * network.beta_us_per_byte;
  return wire_us > kManyTimes * 2 * network.overhead_us && bytes <= kFewPieces * most ? most / 2 : most;
}

// On shared cores messages cost the time of those that work: one carrier sends half as many as two. Measured on 4 hosts
// of 2 ranks, 1 Gbit/s, one carrier's time by two carriers': 32 KiB 0.64, 64 KiB 0.66, 128 and 256 KiB 0.97, 512 KiB
// 0.94, 1 MiB 1.02; CPU 0.62, 0.66, 0.87, 0.70, 0.68, 0.92.
uint32_t carriers_for(uint64_t bytes, uint32_t most, bool shared_cores) {
  constexpr uint64_t kWorthCarrying = uint64_t{192} << 10;
  if (!shared_cores) return most;
  return static_cast<uint32_t>(std::clamp<uint64_t>(bytes / kWorthCarrying, 1, most));
}

// No more than what the network carries in about the latency that another step would cost.
uint64_t riding_bytes(uint32_t nodes, uint64_t longest_message) {
  constexpr uint64_t kSent = uint64_t{24} << 10;
  if (nodes > kMaxDirectNodes) return 0;
  return std::min({kSmallSlotBytes, longest_message, kSent / (nodes - 1)});
}

Topology between_nodes(const Topology& topology, uint32_t nodes, uint32_t carriers) {
  Topology links = topology;
  links.num_ranks = nodes;
  links.node_of_rank.resize(nodes);
  std::iota(links.node_of_rank.begin(), links.node_of_rank.end(), 0u);
  links.network.transit_us_per_byte = links.network.transit();  // a message's own way is as fast as ever
  links.network.beta_us_per_byte *= carriers;
  links.network.burst_bytes /= carriers;
  return links;
}

Choice select_between(uint64_t slice_of_bytes, const Topology& topology, uint32_t nodes, uint32_t carriers,
                      uint64_t slice_bytes) {
  return select_part(Collective::kAllReduce, slice_of_bytes, between_nodes(topology, nodes, carriers), slice_bytes);
}

HierarchicalCost predict_hierarchical(uint64_t bytes, const Topology& topology, uint64_t slice_bytes) {
  std::map<uint32_t, uint32_t> sizes;
  for (const uint32_t node : topology.node_of_rank) ++sizes[node];
  if (sizes.size() < 2) {
    throw ArgumentError("the hierarchical all-reduce works between nodes, but all " +
                        std::to_string(topology.num_ranks) + " ranks are on one: use direct there");
  }
  uint32_t least = topology.num_ranks, most = 1;
  for (const auto& [node, size] : sizes) {
    least = std::min(least, size);
    most = std::max(most, size);
  }
  const auto nodes = static_cast<uint32_t>(sizes.size());
  const auto length = static_cast<double>(bytes), gamma = topology.gamma_us_per_byte;
  HierarchicalCost cost;
  // Each rank's post is seen by the leader, whose verdict all the others see.
  cost.agreement_us = 2 * topology.memory.alpha_us + most * topology.memory.overhead_us + topology.network.alpha_us +
                      2 * (nodes - 1) * topology.network.overhead_us;
  if (topology.handshake_us >= 0) cost.agreement_us = topology.handshake_us;
  if (bytes <= riding_bytes(nodes, slice_bytes)) {
    cost.agreement_us += length * ((nodes - 1) * topology.network.beta_us_per_byte + (most + nodes) * gamma);
  } else {
    const uint32_t carriers = carriers_for(bytes, least, topology.shared_cores);
    const Choice choice = select_between(bytes / carriers, topology, nodes, carriers, slice_bytes);
    const uint64_t piece =
        piece_bytes(bytes, most_piece_bytes(nodes, least, slice_bytes), topology.network, slice_bytes);
    cost.between = choice.algorithm;
    cost.between_us = std::max(choice.candidates[0].predicted_us, kPasses * gamma * length);
    cost.in_node_us = kPasses * gamma * std::min(length, static_cast<double>(piece));
  }
  cost.why = explain(cost, bytes, sizes.size(), topology.num_ranks);
  return cost;
}

}  // namespace dcoll::plan
