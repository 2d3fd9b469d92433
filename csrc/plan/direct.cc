// Direct: everybody talks to everybody. All-reduce in two hops, whatever n is:
//
//   1. Scatter: each rank sends chunk j of its input to rank j.
//   2. Reduce:  rank j adds up the n versions of chunk j in rank order, ((x0 + x1) + x2) + ...
//   3. Gather:  rank j sends the sum to everyone.
//
//        chunk   0    1    2    3                      0    1    2    3
//   rank 0     [ a0 | a1 | a2 | a3 ]           rank 0 [S0]   .    .    .      S0 = ((a0 + b0) + c0) + d0
//   rank 1     [ b0 | b1 | b2 | b3 ]   ---->   rank 1   .  [S1]   .    .      S1 = ((a1 + b1) + c1) + d1
//   rank 2     [ c0 | c1 | c2 | c3 ]           rank 2   .    .  [S2]   .
//   rank 3     [ d0 | d1 | d2 | d3 ]           rank 3   .    .    .  [S3]     then S0..S3 go to everyone
//
// The same volume as the ring, 2(n-1)/n per rank, in two hops instead of 2(n-1), but n-1 peers at once. Rank order is
// the order in which the fused kernel over mapped memory adds slices, so this schedule is the reference it must equal.
//
// Each phase is a channel of its own and so runs ahead of the next: round t+1 is scattered while round t is reduced.
//
// Steps 1 and 2 alone are reduce-scatter, step 3 alone all-gather, step 1 without a sum all-to-all: one hop each. Sends
// have a channel to themselves, so all of them are on their way before the first message is waited for.
#include "plan/algorithms.h"
#include "plan/steps.h"

namespace dcoll::plan {
namespace {

using namespace steps;

enum Lane : uint32_t { kScatter = 0, kReduce = 1, kGather = 2, kNumLanes = 3 };

// Peers are taken in the order of their distance, so that no rank is everybody's first.
uint32_t above(uint32_t n, uint32_t rank, uint32_t distance) { return (rank + distance) % n; }
uint32_t below(uint32_t n, uint32_t rank, uint32_t distance) { return (rank + n - distance) % n; }

// The sum in rank order ends in `result`. The ranks below us come before our own share, and in place that share lies
// where the sum will be, so their sum gathers in scratch first.
void add_rank_order_sum(Channel& lane, uint32_t n, uint32_t rank, Place result) {
  std::vector<Step>& steps = lane.steps;
  const uint32_t last = n - 1;
  Place sum = in(rank);
  if (rank == 1) {
    steps.push_back(message_first(recv_reduce(result, in(rank), 0, rank == last)));
    sum = result;
  } else if (rank >= 2) {
    lane.scratch = true;
    sum = scratch(rank);
    steps.push_back(recv(sum, 0));
    for (uint32_t lower = 1; lower < rank; ++lower) steps.push_back(recv_reduce(sum, sum, lower));
    steps.push_back(reduce(sum, in(rank), rank == last));
  }
  for (uint32_t higher = rank + 1; higher < n; ++higher) {
    steps.push_back(recv_reduce(result, sum, higher, higher == last));
    sum = result;
  }
  if (sum.buffer == BufferId::kScratch) steps.push_back(copy(result, sum));
}

}  // namespace

Schedule direct_all_reduce(uint32_t n, uint32_t rank) {
  Schedule schedule = make_schedule(n, rank, n, n, kNumLanes);
  if (n == 1) {
    schedule.channels[kReduce].steps.push_back(copy(out(0), in(0), true));
    return schedule;
  }
  Channel& scatter = schedule.channels[kScatter];
  scatter.send_on = kReduce;
  for (uint32_t d = 1; d < n; ++d) scatter.steps.push_back(send(in(above(n, rank, d)), above(n, rank, d)));
  Channel& reduction = schedule.channels[kReduce];
  reduction.send_on = kGather;
  add_rank_order_sum(reduction, n, rank, out(rank));
  for (uint32_t d = 1; d < n; ++d) reduction.steps.push_back(send(out(rank), above(n, rank, d)));

  Channel& gather = schedule.channels[kGather];
  for (uint32_t d = 1; d < n; ++d) gather.steps.push_back(recv(out(below(n, rank, d)), below(n, rank, d)));
  return schedule;
}

Schedule direct_reduce_scatter(uint32_t n, uint32_t rank) {
  Schedule schedule = make_schedule(n, rank, n, 1, 2);
  Channel &scatter = schedule.channels[0], &reduction = schedule.channels[1];
  if (n == 1) {
    reduction.steps.push_back(copy(out(0), in(0), true));
    return schedule;
  }
  scatter.send_on = 1;
  for (uint32_t d = 1; d < n; ++d) scatter.steps.push_back(send(in(above(n, rank, d)), above(n, rank, d)));
  add_rank_order_sum(reduction, n, rank, out(0));
  return schedule;
}

Schedule direct_all_gather(uint32_t n, uint32_t rank) {
  Schedule schedule = make_schedule(n, rank, 1, n, 2);
  Channel &scatter = schedule.channels[0], &gather = schedule.channels[1];
  scatter.send_on = 1;
  for (uint32_t d = 1; d < n; ++d) scatter.steps.push_back(send(in(0), above(n, rank, d)));
  scatter.steps.push_back(copy(out(rank), in(0)));
  for (uint32_t d = 1; d < n; ++d) gather.steps.push_back(recv(out(below(n, rank, d)), below(n, rank, d)));
  return schedule;
}

Schedule direct_all_to_all(uint32_t n, uint32_t rank) {
  Schedule schedule = make_schedule(n, rank, n, n, 2);
  Channel &scatter = schedule.channels[0], &gather = schedule.channels[1];
  scatter.send_on = 1;
  for (uint32_t d = 1; d < n; ++d) scatter.steps.push_back(send(in(above(n, rank, d)), above(n, rank, d)));
  scatter.steps.push_back(copy(out(rank), in(rank)));
  for (uint32_t d = 1; d < n; ++d) gather.steps.push_back(recv(out(below(n, rank, d)), below(n, rank, d)));
  return schedule;
}

}  // namespace dcoll::plan
