// Direct all-reduce: everybody talks to everybody, two hops whatever n is.
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
#include "plan/algorithms.h"
#include "plan/steps.h"

namespace dcoll::plan {
namespace {

using namespace steps;

enum Lane : uint32_t { kScatter = 0, kReduce = 1, kGather = 2, kNumLanes = 3 };

// The sum in rank order ends in out(rank). The ranks below us come before our own share, and in place that share lies
// where the sum will be, so their sum gathers in scratch first. (Two ranks need no such care: x0 + x1 = x1 + x0.)
void add_rank_order_sum(Channel& lane, uint32_t n, uint32_t rank) {
  std::vector<Step>& steps = lane.steps;
  const uint32_t last = n - 1;
  Place sum = in(rank);
  if (rank == 1) {
    steps.push_back(recv_reduce(out(rank), in(rank), 0, rank == last));
    sum = out(rank);
  } else if (rank >= 2) {
    lane.scratch = true;
    sum = scratch(rank);
    steps.push_back(recv(sum, 0));
    for (uint32_t below = 1; below < rank; ++below) steps.push_back(recv_reduce(sum, sum, below));
    steps.push_back(reduce(sum, in(rank), rank == last));
  }
  for (uint32_t above = rank + 1; above < n; ++above) {
    steps.push_back(recv_reduce(out(rank), sum, above, above == last));
    sum = out(rank);
  }
  if (sum.buffer == BufferId::kScratch) steps.push_back(copy(out(rank), sum));
}

}  // namespace

Schedule direct_all_reduce(uint32_t n, uint32_t rank) {
  Schedule schedule = make_schedule(n, rank, n, n, kNumLanes);
  if (n == 1) {
    schedule.channels[kReduce].steps.push_back(copy(out(0), in(0), true));
    return schedule;
  }
  // Peers are taken in the order of their distance, so that no rank is everybody's first.
  Channel& scatter = schedule.channels[kScatter];
  scatter.send_on = kReduce;
  for (uint32_t d = 1; d < n; ++d) {
    const uint32_t peer = (rank + d) % n;
    scatter.steps.push_back(send(in(peer), peer));
  }
  Channel& reduction = schedule.channels[kReduce];
  reduction.send_on = kGather;
  add_rank_order_sum(reduction, n, rank);
  for (uint32_t d = 1; d < n; ++d) reduction.steps.push_back(send(out(rank), (rank + d) % n));

  Channel& gather = schedule.channels[kGather];
  for (uint32_t d = 1; d < n; ++d) {
    const uint32_t peer = (rank + n - d) % n;
    gather.steps.push_back(recv(out(peer), peer));
  }
  return schedule;
}

}  // namespace dcoll::plan
