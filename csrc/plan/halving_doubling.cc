// Halving and doubling: reduce-scatter by recursive halving, then all-gather by recursive doubling, so all-reduce sends
// the least bytes, 2(n-1)/n of the buffer, in 2 ceil(log2 n) exchanges. R. Rabenseifner, "Optimization of collective
// reduction operations", ICCS 2004, section 4. His exchange of pairs needs n to be a power of two, and folds away or
// splits up what is more. Here every rank sends up and receives from below instead, which works for every n, without
// further bytes or hops: J. L. Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms",
// arXiv:2410.14234, 2024, section 3 (the pattern is that of J. Bruck et al., "Efficient algorithms for all-to-all
// communications in multiport message-passing systems", IEEE TPDS 8(11), 1997, section 4, which is the all-gather).
//
// Rank r counts chunks from its own: number i is chunk r + i. It starts with s = n of them and in each step gives the
// upper half away: numbers h .. s-1, where h = ceil(s/2), go to rank r + h, which calls them 0 .. s-h-1 and adds them.
//
//   n = 5, numbers      s = 5, h = 3          s = 3, h = 2        s = 2, h = 1
//   that rank r holds   0 1 2 | 3 4 -> r+3    0 1 | 2 -> r+2      0 | 1 -> r+1      0 is chunk r, complete
//
// All-gather runs the same backwards: numbers 0 .. s-h-1 go to rank r - h, which calls them h .. s-1.
//
// Numbers that follow each other are chunks that follow each other (but for the step from chunk n-1 to chunk 0), so a
// half travels as one message, or two; a long one in pieces of kLongestRange chunks. Pieces are sent and received in
// turns: one slot per peer is enough.
#include <algorithm>

#include "plan/algorithms.h"
#include "plan/steps.h"

namespace dcoll::plan {
namespace {

using namespace steps;

// A slice is cut so short that this many fit one message (schedule.h, "range"); more would make slices too short.
constexpr uint32_t kLongestRange = 64;

struct Level {
  uint32_t size, half;
};
// How many numbers are held before and after each step of the halving.
std::vector<Level> levels(uint32_t n) {
  std::vector<Level> all;
  for (uint32_t size = n; size > 1; size = all.back().half) all.push_back({size, (size + 1) / 2});
  return all;
}

struct Piece {
  uint32_t chunk, count;
};
// The numbers begin .. end-1 of rank `rank`, as ranges of chunks.
std::vector<Piece> pieces(uint32_t n, uint32_t rank, uint32_t begin, uint32_t end) {
  std::vector<Piece> all;
  while (begin < end) {
    const uint32_t chunk = (rank + begin) % n;
    const uint32_t count = std::min({end - begin, n - chunk, kLongestRange});
    all.push_back({chunk, count});
    begin += count;
  }
  return all;
}

class Exchanges {
 public:
  Exchanges(Schedule& schedule, uint32_t channel)
      : channel_(schedule.channels[channel]), n_(schedule.num_ranks), rank_(schedule.rank), base_(channel * n_) {
    schedule.longest_range = std::clamp(n_ / 2, 1u, kLongestRange);
  }

  // `source`: where our input lies, `partial`: where sums gather that others will complete. The complete one ends in
  // `result`.
  template <typename Partial>
  void reduce_scatter(Partial partial, Place result) {
    const uint32_t halved = n_ / 2;  // the first step adds to the numbers below this one
    if (n_ % 2 == 1) {               // the middle one then goes with sums, though it is none
      const uint32_t middle = base_ + (rank_ + halved) % n_;
      if (n_ > 1) add(copy(partial(middle), in(middle)));
    }
    for (const auto [size, half] : levels(n_)) {
      const bool first = size == n_, last = half == 1;
      const uint32_t to = (rank_ + half) % n_, from = (rank_ + n_ - half) % n_;
      exchange(
          pieces(n_, rank_, half, size), [&](uint32_t chunk) { return send(first ? in(chunk) : partial(chunk), to); },
          pieces(n_, rank_, 0, size - half),
          [&](uint32_t chunk) {
            const Place addend = first ? in(chunk) : partial(chunk);
            return last ? recv_reduce(result, addend, from, true) : recv_reduce(partial(chunk), addend, from);
          });
    }
  }

  void all_gather() {
    const std::vector<Level> steps = levels(n_);
    for (auto level = steps.rbegin(); level != steps.rend(); ++level) {
      const uint32_t to = (rank_ + n_ - level->half) % n_, from = (rank_ + level->half) % n_;
      exchange(
          pieces(n_, rank_, 0, level->size - level->half), [&](uint32_t chunk) { return send(out(chunk), to); },
          pieces(n_, rank_, level->half, level->size), [&](uint32_t chunk) { return recv(out(chunk), from); });
    }
  }

  void add(const Step& step) { channel_.steps.push_back(step); }

 private:
  template <typename Send, typename Recv>
  void exchange(const std::vector<Piece>& outgoing, Send send_step, const std::vector<Piece>& incoming,
                Recv recv_step) {
    for (size_t i = 0; i < std::max(outgoing.size(), incoming.size()); ++i) {
      if (i < outgoing.size()) add(range(send_step(base_ + outgoing[i].chunk), outgoing[i].count));
      if (i < incoming.size()) add(range(recv_step(base_ + incoming[i].chunk), incoming[i].count));
    }
  }

  Channel& channel_;
  uint32_t n_, rank_, base_;
};

}  // namespace

Schedule halving_doubling_all_reduce(uint32_t n, uint32_t rank, uint32_t num_channels) {
  Schedule schedule = make_schedule(n, rank, n * num_channels, n * num_channels, num_channels);
  for (uint32_t c = 0; c < num_channels; ++c) {
    Exchanges exchanges(schedule, c);
    const uint32_t own = c * n + rank;
    if (n == 1) {
      exchanges.add(copy(out(own), in(own), true));
      continue;
    }
    exchanges.reduce_scatter(out, out(own));
    exchanges.all_gather();
  }
  return schedule;
}

Schedule recursive_halving_reduce_scatter(uint32_t n, uint32_t rank) {
  Schedule schedule = make_schedule(n, rank, n, 1, 1);
  Exchanges exchanges(schedule, 0);
  if (n == 1) {
    exchanges.add(copy(out(0), in(0), true));
    return schedule;
  }
  schedule.work = n > 2;
  exchanges.reduce_scatter(work, out(0));
  return schedule;
}

Schedule bruck_all_gather(uint32_t n, uint32_t rank) {
  Schedule schedule = make_schedule(n, rank, 1, n, 1);
  Exchanges exchanges(schedule, 0);
  exchanges.add(copy(out(rank), in(0)));
  exchanges.all_gather();
  return schedule;
}

}  // namespace dcoll::plan
