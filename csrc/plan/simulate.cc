#include "plan/simulate.h"

#include <algorithm>
#include <vector>

#include "base/error.h"

namespace dcoll::plan {
namespace {

size_t count_steps(const Schedule& schedule) {
  size_t steps = 0;
  for (const Channel& channel : schedule.channels) steps += channel.steps.size();
  return steps;
}

void check(const Cluster& c) {
  auto require = [](bool condition, const std::string& what) {
    if (!condition) throw ArgumentError(what);
  };
  require(c.nodes > 0 && c.ranks_per_node > 0 && uint64_t{c.nodes} * c.ranks_per_node <= 65535,
          "a cluster of " + std::to_string(c.nodes) + " nodes with " + std::to_string(c.ranks_per_node) +
              " ranks: allowed are 1 to 65535 ranks in all");
  require(c.rails > 0, "rails is 0: a node has at least one network card");
  require(c.nodes_per_rack == 0 || c.nodes % c.nodes_per_rack == 0,
          std::to_string(c.nodes) + " nodes do not fill racks of " + std::to_string(c.nodes_per_rack) +
              ": give a divisor of the number of nodes, or 0 for no racks");
  require(c.oversubscription >= 1, "oversubscription is " + std::to_string(c.oversubscription) + ": at least 1");
  require(c.compression >= 1, "compression is " + std::to_string(c.compression) + ": a ratio of at least 1");
}

// One group: of nodes, or of racks where there are several.
Machine machine_of(const Cluster& c, bool group, double flows_per_card) {
  const uint32_t per_rack = (c.nodes_per_rack == 0 ? c.nodes : c.nodes_per_rack) * c.ranks_per_node;
  Machine machine{.constants = c.constants,
                  .seats = {},
                  .simulated = group ? c.ranks_per_node * std::max(c.nodes_per_rack, 1u) : c.num_ranks(),
                  .flows_per_card = flows_per_card,
                  .oversubscription = c.oversubscription,
                  .cards_per_rack = static_cast<double>(c.nodes_per_rack) * c.rails,
                  .spine_alpha_us = c.spine_alpha_us,
                  .compression = c.compression,
                  .encode_us_per_byte = c.encode_us_per_byte,
                  .decode_us_per_byte = c.decode_us_per_byte};
  for (uint32_t rank = 0; rank < c.num_ranks(); ++rank) {
    const uint32_t inside = rank % machine.simulated;
    const uint32_t card = inside / c.ranks_per_node * c.rails + inside % c.ranks_per_node % c.rails;
    machine.seats.push_back({rank / c.ranks_per_node, card, rank / per_rack});
  }
  return machine;
}

Simulated simulate_flows(const Algorithm& algorithm, const Cluster& cluster, double bytes, double flows_per_card,
                         const SimulateOptions& options) {
  check(cluster);
  const uint32_t n = cluster.num_ranks();
  const bool alike = n > 2 && algorithm.stand_in.has_value();
  const uint64_t all_steps =
      uint64_t{n} * std::max(count_steps(algorithm.build(n, 0, 0)), count_steps(algorithm.build(n, n / 2, 0)));
  const bool group = options.method == Method::kOneGroup ||
                     (options.method == Method::kAuto && alike && all_steps > options.few_steps);
  if (group && !alike) {
    throw ArgumentError("the ranks of " + std::string(algorithm.name) +
                        " do not act alike: it is simulated rank by rank");
  }
  if (!group && all_steps > options.most_steps) {
    throw ArgumentError(std::string(algorithm.name) + " on " + std::to_string(n) + " ranks has about " +
                        std::to_string(all_steps) + " steps; at most " + std::to_string(options.most_steps) +
                        " are simulated: use fewer ranks, or another algorithm");
  }
  const std::vector<Schedule> schedules =
      group ? std::vector{algorithm.build(n, *algorithm.stand_in, 0)} : build_all(algorithm, n);
  const Run run =
      simulate_on(machine_of(cluster, group, flows_per_card), schedules, bytes, options.slice_bytes, options.lanes);
  return {.us = run.us, .method = group ? Method::kOneGroup : Method::kEveryRank, .events = run.events};
}

}  // namespace

Simulated simulate(const Algorithm& algorithm, const Cluster& cluster, uint64_t bytes, const SimulateOptions& options) {
  return simulate_flows(algorithm, cluster, static_cast<double>(bytes), 1, options);
}

Simulated simulate_hierarchical(const Algorithm& inner, const Cluster& cluster, uint64_t bytes,
                                const SimulateOptions& options) {
  check(cluster);
  Cluster node = cluster, between = cluster;
  node.nodes = 1;
  node.nodes_per_rack = 0;
  between.ranks_per_node = between.rails = 1;
  const double flows = (cluster.ranks_per_node + cluster.rails - 1) / cluster.rails;
  const double all = static_cast<double>(bytes);
  const SimulateOptions whole{.slice_bytes = options.slice_bytes, .lanes = options.lanes};
  const Simulated phases[] = {
      simulate_flows(algorithm_of(Collective::kReduceScatter, Family::kDirect), node, all, 1, whole),
      simulate_flows(inner, between, all / cluster.ranks_per_node, flows, options),
      simulate_flows(algorithm_of(Collective::kAllGather, Family::kDirect), node, all, 1, whole),
  };
  Simulated sum{.us = 0, .method = phases[1].method, .events = 0};
  for (const Simulated& phase : phases) {
    // Where there is one rank per node, or one node, the phases have nothing to do.
    const bool inside = &phase != &phases[1];
    if (inside ? cluster.ranks_per_node == 1 : cluster.nodes == 1) continue;
    sum.us += phase.us;
    sum.events += phase.events;
  }
  return sum;
}

}  // namespace dcoll::plan
