// All-to-all by pairwise exchange: in step k every rank sends to the rank k above it and receives from the rank k below
// it, so each rank sends one and receives one message per step, and no link is used by two of them in a full-duplex,
// fully connected network. R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations
// in MPICH", IJHPCA 19(1), 2005, section 3.3 (long messages).
//
//   n = 4      k = 1: r -> r+1     k = 2: r -> r+2     k = 3: r -> r+3
//              0 1 2 3             0 1 2 3             0 1 2 3
//               \ \ \ \             crossing            / / / /
//              1 2 3 0             2 3 0 1             3 0 1 2
#include "plan/algorithms.h"
#include "plan/steps.h"

namespace dcoll::plan {

using namespace steps;

Schedule pairwise_all_to_all(uint32_t n, uint32_t rank) {
  Schedule schedule = make_schedule(n, rank, n, n, 1);
  std::vector<Step>& steps = schedule.channels[0].steps;
  // What we keep ourselves.
  steps.push_back(copy(out(rank), in(rank)));
  // n-1 steps: send to the rank k above, receive from the rank k below.
  for (uint32_t k = 1; k < n; ++k) {
    const uint32_t above = (rank + k) % n;
    const uint32_t below = (rank + n - k) % n;
    steps.push_back(send(in(above), above));
    steps.push_back(recv(out(below), below));
  }
  return schedule;
}

}  // namespace dcoll::plan
