// Who sits where, and what moving a message costs there. Plain data: measured by the engine, typed in by a test.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace dcoll::plan {

// LogGP (A. Alexandrov et al., SPAA 1995): a message of m bytes keeps its sender busy for overhead + m * beta, reaches
// the receiver alpha later, and costs the receiver overhead to take. beta grows by the share `fan_in` for every further
// rank that also sends to the same receiver.
//
// Between nodes the link has a rate and a reserve, a token bucket: a node sends, and receives, one byte per beta in the
// long run, but after a pause `burst_bytes` pass at once, as the buffers of switches and the shapers of clouds let
// them. What makes up a message's own way is then `transit` per byte, not beta.
struct LinkModel {
  double alpha_us = 0;
  double overhead_us = 0;
  double beta_us_per_byte = 0;
  double fan_in = 0;
  double burst_bytes = 0;
  double transit_us_per_byte = -1;  // negative: beta

  double transit() const { return transit_us_per_byte < 0 ? beta_us_per_byte : transit_us_per_byte; }
  bool operator==(const LinkModel&) const = default;
};

// What they are called where they are written down. The last two are of networks alone.
struct LinkPart {
  const char* name;
  double LinkModel::* value;
};
inline constexpr std::array kLinkParts = {
    LinkPart{"alpha_us", &LinkModel::alpha_us},
    LinkPart{"overhead_us", &LinkModel::overhead_us},
    LinkPart{"beta_us_per_byte", &LinkModel::beta_us_per_byte},
    LinkPart{"fan_in", &LinkModel::fan_in},
    LinkPart{"burst_bytes", &LinkModel::burst_bytes},
    LinkPart{"transit_us_per_byte", &LinkModel::transit_us_per_byte},
};

// What is measured on the machines of a job (engine/links/calibration.h); the rest of a Topology is who sits where.
struct Constants {
  // Between ranks of one node (the CPU copies) and of different nodes (the node's network card moves the bytes, one
  // message at a time, while the CPU goes on). The defaults are of the right order for a server and a 100 Gbit/s
  // network.
  LinkModel memory{.alpha_us = 0.5, .overhead_us = 0.2, .beta_us_per_byte = 1e-4, .fan_in = 0.02};
  LinkModel network{.alpha_us = 5, .overhead_us = 0.5, .beta_us_per_byte = 8e-5, .fan_in = 0.05};
  double gamma_us_per_byte = 5e-5;  // one pass of the CPU over received or local data: reduce, store or copy
  // The handshake that a collective between nodes begins with, all ranks together. Negative: follows from the links.
  double handshake_us = -1;
  bool shared_cores = false;  // some ranks share a core

  bool operator==(const Constants&) const = default;
};

struct Topology : Constants {
  uint32_t num_ranks = 1;
  std::vector<uint32_t> node_of_rank = {0};

  bool same_node(uint32_t a, uint32_t b) const { return node_of_rank[a] == node_of_rank[b]; }
  const LinkModel& link(uint32_t a, uint32_t b) const { return same_node(a, b) ? memory : network; }

  static Topology on(std::vector<uint32_t> node_of_rank) {
    Topology topology;
    topology.num_ranks = static_cast<uint32_t>(node_of_rank.size());
    topology.node_of_rank = std::move(node_of_rank);
    return topology;
  }
  // n ranks, the first ranks_per_node on node 0, and so on.
  static Topology blocks(uint32_t n, uint32_t ranks_per_node) {
    std::vector<uint32_t> node_of_rank(n);
    for (uint32_t r = 0; r < n; ++r) node_of_rank[r] = r / ranks_per_node;
    return on(std::move(node_of_rank));
  }
  static Topology one_node(uint32_t n) { return blocks(n, n == 0 ? 1 : n); }
};

}  // namespace dcoll::plan
