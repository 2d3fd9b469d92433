// The registry, and what the builders promise about their schedules: steps, bytes, depth.
#include <algorithm>
#include <bit>
#include <functional>
#include <map>

#include "base/error.h"
#include "plan/algorithms.h"
#include "plan/cost.h"
#include "plan/describe.h"
#include "support/check.h"

using namespace dcoll;
using namespace dcoll::plan;

namespace {

// Hops from the furthest rank to the root in tree 0 or 1 (up lanes: channels 0 and 2).
uint32_t depth_of_tree(uint32_t n, uint32_t tree) {
  std::map<uint32_t, uint32_t> parent;
  for (uint32_t rank = 0; rank < n; ++rank) {
    const Step last = tree_all_reduce(n, rank).channels[2 * tree].steps.back();
    const bool is_root = last.op == StepOp::kSend && last.src == BufferId::kOutput;
    if (!is_root) parent[rank] = destination(last);
  }
  CHECK_EQ(parent.size(), n - 1);
  uint32_t deepest = 0;
  for (uint32_t rank = 0; rank < n; ++rank) {
    uint32_t hops = 0;
    for (uint32_t at = rank; parent.count(at) > 0; at = parent[at]) CHECK(++hops < n);
    deepest = std::max(deepest, hops);
  }
  return deepest;
}

// What one rank posts to others, in units of the buffer: 2(n-1)/n for a ring all-reduce.
double sent_share(const Schedule& schedule) {
  size_t chunks = 0;
  for (const Channel& channel : schedule.channels) {
    for (const Step& step : channel.steps) chunks += sends(step.op) ? step.count : 0;
  }
  return static_cast<double>(chunks) / std::max(schedule.input_chunks, schedule.output_chunks);
}

size_t count_steps(const Schedule& schedule, const std::function<bool(const Step&)>& wanted) {
  size_t count = 0;
  for (const Channel& channel : schedule.channels) {
    count += static_cast<size_t>(std::count_if(channel.steps.begin(), channel.steps.end(), wanted));
  }
  return count;
}

}  // namespace

TEST(names_and_lookup) {
  CHECK_EQ(algorithm_names(Collective::kAllReduce),
           std::string("ring, tree, halving_doubling, recursive_doubling, direct"));
  CHECK_EQ(algorithm_names(Collective::kAllToAll), std::string("pairwise, direct"));
  CHECK(find_algorithm(Collective::kAllReduce, "ring") != nullptr);
  CHECK(find_algorithm(Collective::kBroadcast, "ring") == nullptr);
  CHECK(find_algorithm(Collective::kAllReduce, "") == nullptr);
  for (const Algorithm& algorithm : algorithms()) {
    CHECK(find_algorithm(algorithm.collective, algorithm.name) == &algorithm);
    CHECK(!algorithm.reason.empty());
    CHECK(parse_collective(collective_name(algorithm.collective)) == algorithm.collective);
  }
  CHECK_THROWS(parse_collective("allreduce"), ArgumentError,
               "use one of all_reduce, reduce_scatter, all_gather, broadcast, all_to_all");
}

TEST(builders_reject_what_cannot_be) {
  CHECK_THROWS(ring_all_reduce(4, 4), ArgumentError, "rank 4 does not exist: there are 4 ranks");
  CHECK_THROWS(ring_all_reduce(0, 0), ArgumentError, "1 to 65535 ranks, got 0");
  CHECK_THROWS(tree_all_reduce(65536, 0), ArgumentError, "1 to 65535 ranks, got 65536");
  CHECK_THROWS(ring_all_reduce(4, 0, 9), ArgumentError, "1 to 8 channels, got 9");
  CHECK_THROWS(ring_all_reduce(4, 0, 0), ArgumentError, "1 to 8 channels, got 0");
  for (const auto build : {tree_broadcast, binomial_broadcast, chain_broadcast}) {
    CHECK_THROWS(build(4, 0, 4), ArgumentError, "root 4 does not exist");
  }
}

TEST(the_largest_communicator_builds) {
  CHECK_EQ(ring_all_reduce(65535, 65534).channels[0].steps.size(), size_t{2 * 65534 + 1});
  CHECK_EQ(tree_all_reduce(65535, 32766).channels.size(), size_t{4});
  CHECK_EQ(halving_doubling_all_reduce(65535, 7).longest_range, 64u);
  CHECK_EQ(recursive_doubling_all_reduce(65535, 65534).channels[0].steps.size(), size_t{2 + 15});
}

TEST(ring_sends_2_n_minus_1_messages_and_the_least_bytes) {
  for (uint32_t n = 2; n <= 64; ++n) {
    for (uint32_t rank = 0; rank < n; ++rank) {
      for (const uint32_t channels : {1u, 2u, 3u}) {
        const Schedule s = ring_all_reduce(n, rank, channels);
        for (const Channel& channel : s.channels) {
          CHECK_EQ(std::count_if(channel.steps.begin(), channel.steps.end(), [](const Step& t) { return sends(t.op); }),
                   2 * (n - 1));
        }
        CHECK_EQ(sent_share(s), 2.0 * (n - 1) * channels / (n * channels));
      }
      CHECK_EQ(sent_share(ring_reduce_scatter(n, rank)), (n - 1.0) / n);
      CHECK_EQ(sent_share(ring_all_gather(n, rank)), (n - 1.0) / n);
      CHECK_EQ(sent_share(direct_all_reduce(n, rank)), 2.0 * (n - 1) / n);
      CHECK_EQ(sent_share(pairwise_all_to_all(n, rank)), (n - 1.0) / n);
      CHECK_EQ(sent_share(direct_reduce_scatter(n, rank)), (n - 1.0) / n);
      CHECK_EQ(sent_share(direct_all_gather(n, rank)), (n - 1.0) / n);
      CHECK_EQ(sent_share(direct_all_to_all(n, rank)), (n - 1.0) / n);
    }
  }
}

TEST(halving_and_doubling_send_the_least_bytes_in_few_messages) {
  for (uint32_t n = 2; n <= 64; ++n) {
    const auto exchanges = static_cast<size_t>(std::bit_width(n - 1));
    for (uint32_t rank = 0; rank < n; ++rank) {
      const auto messages = [](const Step& s) { return sends(s.op); };
      const Schedule all = halving_doubling_all_reduce(n, rank);
      CHECK_EQ(sent_share(all), 2.0 * (n - 1) / n);
      CHECK_EQ(sent_share(recursive_halving_reduce_scatter(n, rank)), (n - 1.0) / n);
      CHECK_EQ(sent_share(bruck_all_gather(n, rank)), (n - 1.0) / n);
      CHECK_EQ(count_steps(all, messages), 2 * exchanges);
    }
  }
}

TEST(recursive_doubling_sends_the_buffer_in_every_step) {
  for (uint32_t n = 2; n <= 64; ++n) {
    const double steps = std::bit_width(n) - 1;
    for (uint32_t rank = 0; rank < n; ++rank) {
      const bool folded = rank < 2 * (n - std::bit_floor(n));
      const bool exchanges = !folded || rank % 2 == 1;
      CHECK_EQ(sent_share(recursive_doubling_all_reduce(n, rank)), (exchanges ? steps : 0) + (folded ? 1 : 0));
    }
  }
}

TEST(a_chain_sends_once_and_a_binomial_tree_is_log_n_deep) {
  for (uint32_t n = 2; n <= 64; ++n) {
    for (uint32_t rank = 0; rank < n; ++rank) {
      CHECK(sent_share(chain_broadcast(n, rank, 0)) <= 1.0);
      CHECK(sent_share(binomial_broadcast(n, rank, 0)) <= std::bit_width(n - 1));
    }
    CHECK_EQ(sent_share(binomial_broadcast(n, 0, 0)), double(std::bit_width(n - 1)));
  }
}

TEST(ring_talks_to_its_neighbours_only) {
  for (uint32_t n = 2; n <= 9; ++n) {
    for (uint32_t rank = 0; rank < n; ++rank) {
      const auto stranger = [&](const Step& s) {
        return (receives(s.op) && s.peer != (rank + n - 1) % n) || (sends(s.op) && destination(s) != (rank + 1) % n);
      };
      CHECK_EQ(count_steps(ring_all_reduce(n, rank, 2), stranger), size_t{0});
    }
  }
}

TEST(trees_are_shallow_and_no_rank_is_inner_in_both) {
  for (uint32_t n = 2; n <= 300; ++n) {
    for (uint32_t rank = 0; rank < n; ++rank) {
      const Schedule s = tree_all_reduce(n, rank);
      const auto receives_up = [&](uint32_t tree) { return receives(s.channels[2 * tree].steps[0].op); };
      CHECK(!(receives_up(0) && receives_up(1)));
      // At most two children per tree, so at most 2 messages up or down each, plus one to the parent of the other tree.
      CHECK(sent_share(s) <= 2.0);
    }
  }
  for (uint32_t n = 2; n <= 130; ++n) {
    for (const uint32_t tree : {0u, 1u}) CHECK(depth_of_tree(n, tree) <= static_cast<uint32_t>(std::bit_width(n) - 1));
  }
}

TEST(steps_are_described_in_words) {
  CHECK_EQ(describe(ring_all_reduce(3, 1).channels[0].steps[0]), std::string("send in[0] to 2"));
  CHECK_EQ(describe(ring_all_reduce(3, 1).channels[0].steps[1]), std::string("in[2] op message from 0; send to 2"));
  CHECK_EQ(describe(ring_all_reduce(3, 1).channels[0].steps[2]),
           std::string("out[1] = in[1] op message from 0, finalize; send to 2"));
  CHECK_EQ(describe(direct_all_reduce(3, 2).channels[1].steps[2]),
           std::string("scratch[2] = scratch[2] op in[2], finalize"));
}

TEST_MAIN
