// Recursive doubling: in step k every rank exchanges its sum with the rank whose number differs in bit k, and both add.
// log2 n hops, the whole buffer in each: the fewest hops there are, for buffers whose bytes do not matter. R. Thakur,
// R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1), 2005,
// section 4.
//
//   n = 8    step 1        step 2        step 3
//            0-1  2-3      0-2  4-6      0-4  2-6
//            4-5  6-7      1-3  5-7      1-5  3-7
//
// Other n: of the first 2 (n - 2^k) ranks the even ones give their data to the odd one above them and get the result
// from it, so 2^k ranks do the exchange; two hops more.
//
//   n = 6    before             steps 1, 2 among 1 3 4 5     after
//            0 -> 1  2 -> 3     1-3  4-5    1-4  3-5         1 -> 0  3 -> 2
//
// Both partners compute (lower rank's sum) op (higher rank's sum), so all ranks hold the same bits. Sums are sent from
// scratch: memory that is posted may not be written until the peer is known to have taken it, and in an exchange of the
// same slice nothing tells that in time.
#include <bit>

#include "plan/algorithms.h"
#include "plan/steps.h"

namespace dcoll::plan {
namespace {

using namespace steps;

// Who takes part in the exchange, and under which number.
class Core {
 public:
  explicit Core(uint32_t n) : size_(std::bit_floor(n)), folded_(n - size_) {}

  uint32_t size() const { return size_; }
  bool is_extra(uint32_t rank) const { return rank < 2 * folded_ && rank % 2 == 0; }
  bool has_extra(uint32_t rank) const { return rank < 2 * folded_ && rank % 2 == 1; }
  uint32_t number(uint32_t rank) const { return rank < 2 * folded_ ? rank / 2 : rank - folded_; }
  uint32_t rank(uint32_t number) const { return number < folded_ ? 2 * number + 1 : number + folded_; }

 private:
  uint32_t size_, folded_;
};

Step in_rank_order(const Step& step, uint32_t rank) { return step.peer < rank ? message_first(step) : step; }

}  // namespace

Schedule recursive_doubling_all_reduce(uint32_t n, uint32_t rank) {
  Schedule schedule = make_schedule(n, rank, 1, 1, 1);
  Channel& channel = schedule.channels[0];
  std::vector<Step>& steps = channel.steps;
  const Core core(n);
  if (n == 1) {
    steps.push_back(copy(out(0), in(0), true));
    return schedule;
  }
  if (core.is_extra(rank)) {
    steps.push_back(send(in(0), rank + 1));
    steps.push_back(recv(out(0), rank + 1));
    return schedule;
  }
  channel.scratch = true;
  auto partner = [&](uint32_t bit) { return core.rank(core.number(rank) ^ bit); };
  // What we bring: our own, and that of the rank we stand for.
  if (core.has_extra(rank)) {
    steps.push_back(in_rank_order(recv_reduce_send(scratch(0), in(0), rank - 1, partner(1)), rank));
  } else {
    steps.push_back(copy(scratch(0), in(0)));
    steps.push_back(send(scratch(0), partner(1)));
  }
  // Add what each partner has, and show the sum to the next.
  for (uint32_t bit = 1; bit < core.size() / 2; bit *= 2) {
    steps.push_back(in_rank_order(recv_reduce_send(scratch(0), scratch(0), partner(bit), partner(2 * bit)), rank));
  }
  steps.push_back(in_rank_order(recv_reduce(out(0), scratch(0), partner(core.size() / 2), true), rank));
  if (core.has_extra(rank)) steps.push_back(send(out(0), rank - 1));
  return schedule;
}

}  // namespace dcoll::plan
