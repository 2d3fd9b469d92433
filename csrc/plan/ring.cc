// The ring: rank r only ever receives from r-1 and sends to r+1. Bandwidth optimal: 2(n-1)/n of the buffer per rank for
// all-reduce. P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC
// 69(2), 2009, section 3. n = 4, one channel; [c] is what travels on each edge, * marks the fully reduced chunk:
//
//            edge 0->1  1->2  2->3  3->0
//   step 1        [3]   [0]   [1]   [2]     every rank sends the chunk behind its own,
//   step 2        [2]   [3]   [0]   [1]     adds its share to what arrives and passes it on,
//   step 3        [1]   [2]   [3]   [0]
//   step 4        [0]*  [1]*  [2]*  [3]*    until chunk r is complete at rank r,
//   step 5        [3]*  [0]*  [1]*  [2]*    and complete chunks go round once more.
//   step 6        [2]*  [3]*  [0]*  [1]*
//
// Steps 1-3 alone are reduce-scatter, steps 4-6 alone all-gather. Channel c is a ring of its own over its own n chunks.
//
// Rank 0 splits each fused step into a receive and a send. With one slot per FIFO the ring holds n messages in n slots
// once everybody sent first, and nobody could both consume and pass on; rank 0, which takes a message out before it
// needs room for the next, is the hole that lets the others move.
#include "plan/algorithms.h"
#include "plan/steps.h"

namespace dcoll::plan {
namespace {

using namespace steps;

class RingChannel {
 public:
  RingChannel(Channel& channel, uint32_t n, uint32_t rank) : channel_(channel), n_(n), rank_(rank) {}

  uint32_t prev() const { return (rank_ + n_ - 1) % n_; }
  uint32_t next() const { return (rank_ + 1) % n_; }
  // The rank `distance` places behind this one.
  uint32_t behind(uint32_t distance) const { return (rank_ + n_ - distance) % n_; }

  void add(const Step& step) { channel_.steps.push_back(step); }

  // Add our share to what arrives; the sum goes on to the next rank and is not kept.
  void reduce_onward(uint32_t chunk) {
    if (is_hole()) {
      channel_.scratch = true;
      add(recv_reduce(scratch(chunk), in(chunk), prev()));
      add(send(scratch(chunk), next()));
    } else {
      add(recv_reduce_send(nowhere(chunk), in(chunk), prev(), next()));
    }
  }
  // Our share completes the chunk: keep it and send it round.
  void complete_onward(uint32_t chunk) {
    if (is_hole()) {
      add(recv_reduce(out(chunk), in(chunk), prev(), true));
      add(send(out(chunk), next()));
    } else {
      add(recv_reduce_send(out(chunk), in(chunk), prev(), next(), true));
    }
  }
  // A complete chunk passes by: keep a copy.
  void copy_onward(uint32_t chunk) {
    if (is_hole()) {
      add(recv(out(chunk), prev()));
      add(send(out(chunk), next()));
    } else {
      add(recv_send(out(chunk), prev(), next()));
    }
  }

 private:
  bool is_hole() const { return rank_ == 0; }

  Channel& channel_;
  uint32_t n_, rank_;
};

}  // namespace

Schedule ring_all_reduce(uint32_t n, uint32_t rank, uint32_t num_channels) {
  Schedule schedule = make_schedule(n, rank, n * num_channels, n * num_channels, num_channels);
  for (uint32_t c = 0; c < num_channels; ++c) {
    RingChannel ring(schedule.channels[c], n, rank);
    const uint32_t base = c * n;
    if (n == 1) {
      ring.add(copy(out(base), in(base), true));
      continue;
    }
    // Our part of the chunk behind us starts its way.
    ring.add(send(in(base + ring.behind(1)), ring.next()));
    // n-2 steps: reduce and pass on.
    for (uint32_t d = 2; d < n; ++d) ring.reduce_onward(base + ring.behind(d));
    // Our own chunk arrives with everybody else's share.
    ring.complete_onward(base + rank);
    // n-2 steps: keep a copy and pass on.
    for (uint32_t d = 1; d < n - 1; ++d) ring.copy_onward(base + ring.behind(d));
    // The last one ends here.
    ring.add(recv(out(base + ring.behind(n - 1)), ring.prev()));
  }
  return schedule;
}

Schedule ring_reduce_scatter(uint32_t n, uint32_t rank) {
  Schedule schedule = make_schedule(n, rank, n, 1, 1);
  RingChannel ring(schedule.channels[0], n, rank);
  if (n == 1) {
    ring.add(copy(out(0), in(0), true));
    return schedule;
  }
  ring.add(send(in(ring.behind(1)), ring.next()));
  for (uint32_t d = 2; d < n; ++d) ring.reduce_onward(ring.behind(d));
  ring.add(recv_reduce(out(0), in(rank), ring.prev(), true));
  return schedule;
}

Schedule ring_all_gather(uint32_t n, uint32_t rank) {
  Schedule schedule = make_schedule(n, rank, 1, n, 1);
  RingChannel ring(schedule.channels[0], n, rank);
  if (n > 1) ring.add(send(in(0), ring.next()));
  // Our own block, while the first message travels.
  ring.add(copy(out(rank), in(0)));
  if (n == 1) return schedule;
  for (uint32_t d = 1; d < n - 1; ++d) ring.copy_onward(ring.behind(d));
  ring.add(recv(out(ring.behind(n - 1)), ring.prev()));
  return schedule;
}

}  // namespace dcoll::plan
