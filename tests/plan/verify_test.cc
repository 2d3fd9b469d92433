// Every builder is proved for all n up to DCOLL_TEST_MAX_RANKS (64), and the verifier itself is tested: it must
// name each kind of fault.
#include "plan/verify.h"

#include <algorithm>
#include <cstdlib>

#include "plan/names.h"
#include "plan/steps.h"
#include "support/check.h"

using dcoll::test::full_name;
using namespace dcoll::plan;
using namespace dcoll::plan::steps;

namespace {

// Sanitizer builds are slow: they may prove fewer.
uint32_t max_ranks() {
  const char* limit = std::getenv("DCOLL_TEST_MAX_RANKS");
  const int ranks = limit == nullptr ? 64 : std::atoi(limit);
  if (ranks < 2) throw std::runtime_error(std::string("DCOLL_TEST_MAX_RANKS must be at least 2, got ") + limit);
  return static_cast<uint32_t>(ranks);
}

void check_right(const std::vector<Schedule>& all, Collective collective, const VerifyOptions& options,
                 const std::string& what) {
  const VerifyResult result = verify(all, collective, options);
  if (!result) {
    throw std::runtime_error(what + ", " + std::to_string(all.size()) + " ranks, depth " +
                             std::to_string(options.slot_depth) + (options.in_place ? ", in place: " : ": ") +
                             result.message);
  }
}

void check_all_modes(const std::vector<Schedule>& all, Collective collective, VerifyOptions options,
                     const std::string& what) {
  for (options.slot_depth = 1; options.slot_depth <= 2; ++options.slot_depth) {
    options.in_place = false;
    check_right(all, collective, options, what);
    if (collective == Collective::kAllToAll) continue;
    options.in_place = true;
    check_right(all, collective, options, what);
  }
}

void prove_all(Collective collective) {
  for (const Algorithm& algorithm : algorithms()) {
    if (algorithm.collective != collective) continue;
    for (uint32_t n = 1; n <= max_ranks(); ++n) {
      VerifyOptions options;
      options.rank_order = algorithm.name == "direct";
      check_all_modes(build_all(algorithm, n), collective, options, full_name(algorithm));
    }
  }
}

// A two-rank all-reduce of one chunk by hand, right unless `edit` breaks it: rank 1 sends, rank 0 sums and answers.
std::vector<Schedule> by_hand() {
  std::vector<Schedule> all{make_schedule(2, 0, 1, 1, 1), make_schedule(2, 1, 1, 1, 1)};
  all[0].channels[0].steps = {recv_reduce(out(0), in(0), 1, true), send(out(0), 1)};
  all[1].channels[0].steps = {send(in(0), 0), recv(out(0), 0)};
  return all;
}

void expect_fault(const std::vector<Schedule>& all, Collective collective, const VerifyOptions& options,
                  const std::string& message) {
  const VerifyResult result = verify(all, collective, options);
  if (result.message.find(message) == std::string::npos) {
    throw std::runtime_error("expected '" + message + "', got '" + result.message + "'");
  }
}
void expect_fault(const std::vector<Schedule>& all, const std::string& message, const VerifyOptions& options = {}) {
  expect_fault(all, Collective::kAllReduce, options, message);
}

}  // namespace

TEST(all_reduces_are_right) { prove_all(Collective::kAllReduce); }
TEST(reduce_scatters_are_right) { prove_all(Collective::kReduceScatter); }
TEST(all_gathers_are_right) { prove_all(Collective::kAllGather); }
TEST(all_to_alls_are_right) { prove_all(Collective::kAllToAll); }

TEST(broadcasts_are_right_from_any_root) {
  for (const Algorithm& algorithm : algorithms()) {
    if (algorithm.collective != Collective::kBroadcast) continue;
    for (uint32_t n = 1; n <= max_ranks(); ++n) {
      for (uint32_t root = 0; root < n; root += n <= 16 ? 1 : n / 3) {
        VerifyOptions options;
        options.root = root;
        check_all_modes(build_all(algorithm, n, root), Collective::kBroadcast, options, full_name(algorithm));
      }
    }
  }
}

TEST(rings_on_several_channels_are_right) {
  for (uint32_t n = 1; n <= 9; ++n) {
    for (uint32_t channels = 1; channels <= kMaxScheduleChannels; ++channels) {
      std::vector<Schedule> all_reduce;
      for (uint32_t rank = 0; rank < n; ++rank) all_reduce.push_back(ring_all_reduce(n, rank, channels));
      check_all_modes(all_reduce, Collective::kAllReduce, {}, "all_reduce");
    }
  }
}

TEST(more_rounds_and_slots_stay_right) {
  for (const Algorithm& algorithm : algorithms()) {
    for (const uint32_t n : {2u, 5u, 8u}) {
      VerifyOptions options;
      options.rounds = 7;
      options.slot_depth = 4;
      check_right(build_all(algorithm, n), algorithm.collective, options, full_name(algorithm));
    }
  }
}

TEST(by_hand_is_right) { CHECK(verify(by_hand(), Collective::kAllReduce)); }

TEST(deadlock_names_who_waits_for_whom) {
  auto all = by_hand();
  std::swap(all[1].channels[0].steps[0], all[1].channels[0].steps[1]);
  expect_fault(all, "deadlock with 1 slots per FIFO:");
  expect_fault(all,
               "rank 0 channel 0 step 0 (recv_reduce: out[0] = in[0] op message from 1, finalize) in round 0 waits for "
               "a message from rank 1");
  expect_fault(all,
               "rank 1 channel 0 step 0 (recv: out[0] = message from 0) in round 0 waits for a message from rank 0");
}

// Why rank 0 of the ring splits its fused steps.
TEST(ring_of_fused_steps_only_deadlocks_with_one_slot) {
  std::vector<Schedule> all;
  for (uint32_t rank = 0; rank < 4; ++rank) {
    all.push_back(ring_all_reduce(4, rank));
    if (rank > 0) continue;
    std::vector<Step> fused;
    std::vector<Step>& steps = all[0].channels[0].steps;
    for (size_t i = 0; i < steps.size(); ++i) {
      if (i + 1 < steps.size() && steps[i].op == StepOp::kRecvReduce && !steps[i].finalize) {
        fused.push_back(recv_reduce_send(nowhere(steps[i].chunk), in(steps[i].src_chunk), 3, 1));
        ++i;
      } else {
        fused.push_back(steps[i]);
      }
    }
    steps = fused;
  }
  VerifyOptions options;
  expect_fault(all, "to take a message from channel 0", options);
  options.slot_depth = 2;
  CHECK(verify(all, Collective::kAllReduce, options));
}

TEST(message_nobody_receives) {
  auto all = by_hand();
  all[0].channels[0].steps.push_back(send(out(0), 1));
  VerifyOptions options;
  options.rounds = 1;
  expect_fault(all, "1 messages from rank 0 to rank 1 on channel 0 are never received", options);
}

TEST(contribution_taken_twice) {
  auto all = by_hand();
  all[0].channels[0].steps.insert(all[0].channels[0].steps.begin() + 1, reduce(out(0), in(0)));
  all[0].channels[0].steps[0].finalize = false;
  all[0].channels[0].steps[1].finalize = true;
  expect_fault(all, "takes a contribution twice");
}

TEST(finalize_early_late_twice) {
  auto all = by_hand();
  all[0].channels[0].steps[0].finalize = false;
  expect_fault(all, "is not finalized");

  // Both may, if they compute the same.
  std::vector<Schedule> two_finals{make_schedule(2, 0, 1, 1, 1), make_schedule(2, 1, 1, 1, 1)};
  for (uint32_t rank = 0; rank < 2; ++rank) {
    two_finals[rank].channels[0].steps = {send(in(0), 1 - rank), recv_reduce(out(0), in(0), 1 - rank, true)};
  }
  expect_fault(two_finals, "drifts: it is not computed as on rank 0");
  Step& second = two_finals[1].channels[0].steps[1];
  second = message_first(second);
  CHECK(verify(two_finals, Collective::kAllReduce));

  all = by_hand();
  all[0].channels[0].steps.insert(all[0].channels[0].steps.begin(), copy(out(0), in(0), true));
  expect_fault(all, "finalizes before all contributions are in");
  all = by_hand();
  all[0].channels[0].steps.insert(all[0].channels[0].steps.begin() + 1, reduce(out(0), in(0)));
  expect_fault(all, "reduces further what was finalized already");
}

TEST(scratch_must_be_declared_and_written) {
  auto all = by_hand();
  all[0].channels[0].steps = {recv(scratch(0), 1), copy(out(0), in(0)), reduce(out(0), scratch(0), true),
                              send(out(0), 1)};
  expect_fault(all, "uses scratch, which its channel does not declare");
  all[0].channels[0].scratch = true;
  CHECK(verify(all, Collective::kAllReduce));
  // Scratch of the last round is gone.
  all[0].channels[0].steps = {copy(out(0), scratch(0)), recv(scratch(0), 1)};
  expect_fault(all, "reads scratch before writing it in this round");
}

// Three ranks, rank 1 passes on its own before the others': mathematically equal sums, different bits.
TEST(drift_is_found) {
  std::vector<Schedule> all;
  for (uint32_t rank = 0; rank < 3; ++rank) all.push_back(direct_all_reduce(3, rank));
  VerifyOptions options;
  options.rank_order = true;
  CHECK(verify(all, Collective::kAllReduce, options));
  std::vector<Step>& steps = all[0].channels[1].steps;  // out[0] = in[0] op 1; out[0] = out[0] op 2, finalize; ...
  std::swap(steps[0].peer, steps[1].peer);
  expect_fault(all, "is not summed in rank order", options);
  CHECK(verify(all, Collective::kAllReduce));  // still an all-reduce, everyone holds copies of one sum

  // Everyone sums everything for itself, in the order its messages come: the same number, other bits.
  std::vector<Schedule> drifting;
  for (uint32_t rank = 0; rank < 3; ++rank) {
    const uint32_t next = (rank + 1) % 3, prev = (rank + 2) % 3;
    Schedule s = make_schedule(3, rank, 1, 1, 1);
    s.channels[0].steps = {send(in(0), next), send(in(0), prev), recv_reduce(out(0), in(0), prev),
                           recv_reduce(out(0), out(0), next, rank == 0)};
    drifting.push_back(s);
  }
  expect_fault(drifting, "output chunk 0 round 0 drifts");
}

TEST(channels_that_share_memory_unordered_race) {
  // Two channels of rank 0 both write out[0]; no message orders them.
  auto all = by_hand();
  for (Schedule& s : all) s.channels.resize(2);
  all[0].channels[1].steps = {copy(out(0), in(0))};
  VerifyOptions options;
  options.rounds = 1;
  const VerifyResult result = verify(all, Collective::kAllReduce, options);
  CHECK(!result);

  // Broadcast: channel 0 receives, channel 1 passes on without waiting for it. Right only by luck of the order.
  std::vector<Schedule> relay;
  for (uint32_t rank = 0; rank < 3; ++rank) relay.push_back(make_schedule(3, rank, 1, 1, 2));
  relay[0].channels[0].steps = {copy(out(0), in(0)), send(in(0), 1)};
  relay[1].channels[0].steps = {recv(out(0), 0)};
  relay[1].channels[1].steps = {send(out(0), 2)};
  relay[2].channels[1].steps = {recv(out(0), 1)};
  CHECK(!verify(relay, Collective::kBroadcast, {}));

  // Values that come out right in every order, but are not ordered: the second channel overwrites with the same data.
  std::vector<Schedule> same;
  for (uint32_t rank = 0; rank < 2; ++rank) same.push_back(make_schedule(2, rank, 1, 1, 2));
  same[0].channels[0].steps = {send(in(0), 1), copy(out(0), in(0))};
  same[0].channels[1].steps = {send(in(0), 1)};
  same[1].channels[0].steps = {recv(out(0), 0)};
  same[1].channels[1].steps = {recv(out(0), 0)};
  expect_fault(same, Collective::kBroadcast, {}, "and no message orders the two");
}

TEST(writing_memory_the_peer_may_still_read) {
  // In place, rank 1 posts in[0] and then writes out[0], the same memory, without word from rank 0 that it was
  // consumed.
  std::vector<Schedule> all;
  for (uint32_t rank = 0; rank < 3; ++rank) all.push_back(make_schedule(3, rank, 1, 1, 1));
  all[0].channels[0].steps = {copy(out(0), in(0)), send(in(0), 1), send(in(0), 2)};
  all[1].channels[0].steps = {recv(out(0), 0), send(out(0), 2), recv(out(0), 2)};
  all[2].channels[0].steps = {recv(out(0), 0), send(out(0), 1), recv(out(0), 1)};
  expect_fault(all, Collective::kBroadcast, {}, "has posted, and nothing proves that the peer has consumed it");
  // Ranks 1 and 2 exchange the other way round: now the answer proves it.
  all[2].channels[0].steps = {recv(out(0), 0), recv(out(0), 1), send(out(0), 1)};
  CHECK(verify(all, Collective::kBroadcast, {}));
}

TEST(a_proof_may_not_lean_on_messages_of_other_chunks) {
  // Rank 1 posts out[0] and writes it again after a message about chunk 1, which may be empty and never sent.
  std::vector<Schedule> all;
  for (uint32_t rank = 0; rank < 2; ++rank) all.push_back(make_schedule(2, rank, 2, 2, 1));
  all[0].channels[0].steps = {copy(out(0), in(0)), copy(out(1), in(1)), send(in(0), 1), recv(out(0), 1),
                              send(in(1), 1)};
  all[1].channels[0].scratch = true;
  all[1].channels[0].steps = {recv(scratch(0), 0), copy(out(0), scratch(0)), send(out(0), 0), recv(out(1), 0),
                              copy(out(0), scratch(0))};
  expect_fault(all, Collective::kBroadcast, {}, "nothing proves that the peer has consumed it");
}

TEST(two_channels_may_not_feed_one_fifo) {
  auto all = by_hand();
  all[1].channels.resize(2);
  expect_fault(all, "rank 1: has 2 channels, rank 0 has 1");
  all[0].channels.resize(2);
  all[1].channels[1].send_on = 0;
  all[1].channels[1].steps = {send(in(0), 0)};
  expect_fault(all, "another channel of this rank feeds the same FIFO");
}

TEST(headers_and_options_are_checked) {
  auto all = by_hand();
  all[1].rank = 0;
  expect_fault(all, "its schedule is for rank 0 of 2, not 1 of 2");
  all = by_hand();
  all[1].output_chunks = 2;
  expect_fault(all, "rank 1: cuts input and output into 1 and 2 chunks");
  expect_fault(by_hand(), Collective::kAllGather, {}, "do not make a all_gather");
  VerifyOptions no_slots, in_place;
  no_slots.slot_depth = 0;
  in_place.in_place = true;
  expect_fault(by_hand(), Collective::kAllReduce, no_slots, "slot_depth must be at least 1");
  expect_fault({}, "no schedules were given");
  const auto exchange = build_all(*find_algorithm(Collective::kAllToAll, "pairwise"), 3);
  expect_fault(exchange, Collective::kAllToAll, in_place, "all-to-all has no in-place form");
}

TEST_MAIN
