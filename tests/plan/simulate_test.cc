// The simulator of large clusters against the exact one of cost.h, and against what can be computed by hand.
#include "plan/simulate.h"

#include <cmath>

#include "base/error.h"
#include "support/check.h"

using namespace dcoll;
using namespace dcoll::plan;

namespace {

constexpr uint64_t kMiB = 1 << 20;

const Algorithm& all_reduce(std::string_view name) { return *find_algorithm(Collective::kAllReduce, name); }

Cluster cluster(uint32_t nodes, uint32_t ranks_per_node) {
  Cluster c;
  c.nodes = nodes;
  c.ranks_per_node = ranks_per_node;
  return c;
}

double predicted(const Algorithm& algorithm, const Cluster& c, uint64_t bytes, const SimulateOptions& options = {}) {
  Topology topology = Topology::blocks(c.num_ranks(), c.ranks_per_node);
  static_cast<Constants&>(topology) = c.constants;
  return predict_us(build_all(algorithm, c.num_ranks()), bytes, topology, options.slice_bytes, options.lanes);
}

double off(double a, double b) { return a == b ? 0.0 : std::abs(a - b) / b; }

void check_agrees(const Algorithm& algorithm, const Cluster& c, uint64_t bytes, const SimulateOptions& options,
                  double tolerance) {
  const double want = predicted(algorithm, c, bytes, options), got = simulate(algorithm, c, bytes, options).us;
  if (off(got, want) <= tolerance) return;
  throw std::runtime_error(std::string(collective_name(algorithm.collective)) + " " + std::string(algorithm.name) +
                           " of " + std::to_string(bytes) + " bytes on " + std::to_string(c.nodes) + " x " +
                           std::to_string(c.ranks_per_node) + " ranks: " + std::to_string(got) + " us, exactly " +
                           std::to_string(want));
}

}  // namespace

TEST(agrees_with_the_exact_model) {
  for (const Algorithm& algorithm : algorithms()) {
    for (const auto& [nodes, per_node] : {std::pair{1u, 1u}, {1u, 8u}, {5u, 1u}, {2u, 3u}, {4u, 8u}}) {
      for (const uint64_t bytes : {uint64_t{0}, uint64_t{8}, uint64_t{70'001}, 4 * kMiB, 64 * kMiB}) {
        check_agrees(algorithm, cluster(nodes, per_node), bytes, {}, 1e-9);
        check_agrees(algorithm, cluster(nodes, per_node), bytes, {.slice_bytes = 32 << 10, .lanes = 4}, 1e-9);
      }
    }
  }
}

// One group of ranks for all. Exact but for the rank of the ring that splits its steps, and for the halves that pass
// the last chunk.
TEST(one_group_stands_for_all) {
  for (const Algorithm& algorithm : algorithms()) {
    const std::string name(algorithm.name);
    const bool symmetric = name == "ring" || name == "halving_doubling" || name == "recursive_halving" ||
                           name == "bruck" || name == "pairwise" ||
                           (name == "direct" && (algorithm.collective == Collective::kAllGather ||
                                                 algorithm.collective == Collective::kAllToAll));
    const SimulateOptions group{.method = Method::kOneGroup};
    if (!symmetric) {
      CHECK_THROWS(simulate(algorithm, cluster(4, 2), 8, group), ArgumentError, "do not act alike");
      continue;
    }
    const bool halves = name == "halving_doubling" || name == "recursive_halving" || name == "bruck";
    for (const auto& [nodes, per_node] : {std::pair{8u, 1u}, {4u, 8u}, {9u, 3u}, {16u, 4u}}) {
      for (const uint64_t bytes : {uint64_t{8}, uint64_t{70'001}, 4 * kMiB, 64 * kMiB}) {
        if (halves && nodes == 9) continue;
        check_agrees(algorithm, cluster(nodes, per_node), bytes, group, 0.01);
      }
    }
  }
}

TEST(a_cluster_of_thousands_is_simulated_in_little_time) {
  uint64_t events = 0;
  for (const char* name : {"ring", "tree", "halving_doubling"}) {
    events += simulate(all_reduce(name), cluster(512, 8), 64 * kMiB).events;
    events += simulate_hierarchical(all_reduce(name), cluster(512, 8), 64 * kMiB).events;
  }
  CHECK(events < 1'000'000);  // of which a few million pass in a second
  for (const char* name : {"ring", "halving_doubling"}) {
    CHECK(simulate(all_reduce(name), cluster(2048, 8), 64 * kMiB).events < 1'000'000);
  }
  CHECK_THROWS(simulate(all_reduce("direct"), cluster(512, 8), 8), ArgumentError, "direct on 4096 ranks has about");
  CHECK_THROWS(simulate(all_reduce("tree"), cluster(8192, 8), 8), ArgumentError, "allowed are 1 to 65535 ranks");
}

// Where only the network costs time, what passes the cards decides.
TEST(rails_racks_and_compression_scale_the_bytes) {
  Cluster c = cluster(8, 4);
  c.constants.memory = {};
  c.constants.gamma_us_per_byte = 0;
  c.constants.network = {.alpha_us = 0, .overhead_us = 0, .beta_us_per_byte = 1e-3, .fan_in = 0};
  const Algorithm& ring = all_reduce("ring");
  const double bound = 2.0 * 7 / 8 * 64 * kMiB * 1e-3;
  const double plain = simulate_hierarchical(ring, c, 64 * kMiB).us;
  CHECK(off(plain, bound) < 0.02);
  c.rails = 2;
  CHECK(off(simulate_hierarchical(ring, c, 64 * kMiB).us, bound / 2) < 0.02);
  c.rails = 1;
  c.compression = 4;
  CHECK(off(simulate_hierarchical(ring, c, 64 * kMiB).us, bound / 4) < 0.02);
  c.encode_us_per_byte = 4e-3;  // every rank encodes what it sends, 2 * 7/8 of its quarter
  CHECK(simulate_hierarchical(ring, c, 64 * kMiB).us > bound);
  c.encode_us_per_byte = 0;
  c.compression = 1;
  // A ring crosses from rack to rack once: an uplink of two cards' worth at half rate is what one card carries.
  c.nodes_per_rack = 2;
  c.oversubscription = 2;
  CHECK(off(simulate_hierarchical(ring, c, 64 * kMiB).us, bound) < 0.05);
  c.oversubscription = 8;
  CHECK(off(simulate_hierarchical(ring, c, 64 * kMiB).us, 4 * bound) < 0.05);
  const SimulateOptions group{.method = Method::kOneGroup}, every{.method = Method::kEveryRank};
  c.spine_alpha_us = 3;
  CHECK(off(simulate(ring, c, 64 * kMiB, group).us, simulate(ring, c, 64 * kMiB, every).us) < 0.01);
}

TEST(hierarchical_of_one_level_is_that_level) {
  const Algorithm& ring = all_reduce("ring");
  CHECK_EQ(simulate_hierarchical(ring, cluster(8, 1), kMiB).us, simulate(ring, cluster(8, 1), kMiB).us);
  CHECK(simulate_hierarchical(ring, cluster(1, 8), kMiB).us > 0);
  CHECK_EQ(simulate_hierarchical(ring, cluster(1, 1), kMiB).us, 0.0);
}

TEST(wrong_clusters_are_explained) {
  const Algorithm& ring = all_reduce("ring");
  Cluster c = cluster(6, 2);
  c.nodes_per_rack = 4;
  CHECK_THROWS(simulate(ring, c, 8), ArgumentError, "6 nodes do not fill racks of 4");
  c = cluster(0, 2);
  CHECK_THROWS(simulate(ring, c, 8), ArgumentError, "a cluster of 0 nodes");
  c = cluster(2, 2);
  c.compression = 0.5;
  CHECK_THROWS(simulate(ring, c, 8), ArgumentError, "a ratio of at least 1");
  c = cluster(2, 2);
  c.rails = 0;
  CHECK_THROWS(simulate(ring, c, 8), ArgumentError, "rails is 0");
}

TEST_MAIN
