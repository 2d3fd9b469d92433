// Broadcasts: a binomial tree for small buffers, a chain for large ones (tree.cc has the binary tree between the two).
#include <bit>

#include "plan/algorithms.h"
#include "plan/steps.h"

namespace dcoll::plan {
using namespace steps;

// Binomial tree: whoever has the data sends it on in every step, so their number doubles: ceil(log2 n) hops, the fewest
// there are. The children of the rank at distance v from the root are v + 1, v + 2, v + 4, ... below v's lowest set
// bit. Thakur, Rabenseifner, Gropp 2005, section 3.2 (short messages).
//
//   n = 8            0              the furthest child first: its subtree is the largest
//            4       2     1
//          6   5     3
//          7
Schedule binomial_broadcast(uint32_t n, uint32_t rank, uint32_t root) {
  Schedule schedule = make_broadcast(n, rank, root);
  std::vector<Step>& steps = schedule.channels[0].steps;
  const uint32_t v = (rank + n - root) % n;
  auto to_rank = [&](uint32_t place) { return (place + root) % n; };
  const uint32_t lowest_bit = v == 0 ? std::bit_ceil(n) : v & (~v + 1);
  const Place source = v == 0 ? in(0) : out(0);
  bool received = v == 0;
  for (uint32_t bit = lowest_bit / 2; bit > 0; bit /= 2) {
    if (v + bit >= n) continue;
    steps.push_back(received ? send(source, to_rank(v + bit))
                             : recv_send(out(0), to_rank(v - lowest_bit), to_rank(v + bit)));
    received = true;
  }
  if (!received) steps.push_back(recv(out(0), to_rank(v - lowest_bit)));
  if (v == 0) steps.push_back(copy(out(0), in(0)));
  return schedule;
}

// Chain: every rank passes slices on to the next, so each sends the buffer once, half of what an inner node of a binary
// tree does, and of what scatter and all-gather (van de Geijn) cost: S/B + (n - 2) slices, the least for large buffers.
// J. Pjesivac-Grbovic et al., "Performance analysis of MPI collective operations", Cluster Computing 10(2), 2007,
// section 3 (pipeline).
//
//   root -> root+1 -> root+2 -> ... -> root-1
Schedule chain_broadcast(uint32_t n, uint32_t rank, uint32_t root) {
  Schedule schedule = make_broadcast(n, rank, root);
  std::vector<Step>& steps = schedule.channels[0].steps;
  const uint32_t next = (rank + 1) % n, prev = (rank + n - 1) % n;
  if (rank == root) {
    if (n > 1) steps.push_back(send(in(0), next));
    steps.push_back(copy(out(0), in(0)));
  } else {
    steps.push_back(next == root ? recv(out(0), prev) : recv_send(out(0), prev, next));
  }
  return schedule;
}

}  // namespace dcoll::plan
