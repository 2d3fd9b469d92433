#include "engine/links/calibration.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "base/clock.h"
#include "engine/schedule/executor.h"
#include "kernels/reduce.h"

namespace dcoll {
namespace {

// What is measured is what schedules use: for streams all of their channels, as the engine's lanes do.
constexpr uint64_t kChannels = plan::kMaxScheduleChannels;
constexpr size_t kShort = 8;
// A long message, but one that leaves at once: what a library does about longer ones (Open MPI asks the receiver first,
// from 64 KiB) is latency, which many messages under way hide. Streams are of slices, as in a collective: such messages
// are copied once less.
constexpr size_t kLong = size_t{32} << 10;
constexpr uint64_t kPings = 48, kLongPings = 8, kWarmHops = 8, kHops = 24;
constexpr double kPingsUs = 10e3;   // of one size, at most
constexpr double kStreamUs = 15e3;  // no longer stream is begun if it were to take more
// The longest is measured again and again for so long. What is between nodes may stall; memory does not.
constexpr double kAgainUs = 35e3, kAgainInMemoryUs = 8e3;
constexpr uint64_t kUnderWay = 8;  // messages of a stream
constexpr uint64_t kFirstStream = 4, kStreamGrowth = 4;
constexpr uint64_t kShortStream = 64;
constexpr double kCrowdUs = 8e3;
constexpr uint32_t kCrowd = 3;
constexpr size_t kReducedBytes = size_t{2} << 20;

double microseconds_since(Clock::time_point begin) { return 1e6 * seconds_between(begin, Clock::now()); }

// Some messages to a peer and some from it, at once, dealt out to all channels.
class Exchange final : public Pollable {
 public:
  struct Count {
    uint64_t out, in;
  };
  // `data` is sent, again and again; it stays unchanged until the exchange is over.
  Exchange(Messages& transport, int peer, const std::byte* data, size_t bytes, Count count)
      : transport_(transport), peer_(peer), data_(data), bytes_(bytes), count_(count) {}

  bool poll(bool& moved) override {
    while (posted_ < count_.in && transport_.post_recv(peer_, channel(posted_), nullptr, bytes_)) ++posted_;
    while (sent_ < may_be_sent() && transport_.post_send(peer_, channel(sent_), data_, bytes_)) {
      ++sent_;
      moved = true;
    }
    while (received_ < posted_) {
      const std::byte* message = transport_.front(peer_, channel(received_));
      if (message == nullptr) break;
      std::memcpy(&first_, message, sizeof first_);
      transport_.pop(peer_, channel(received_));
      ++received_;
      moved = true;
    }
    return received_ == count_.in && sent_ == count_.out && all_left();
  }
  void waiting_for(std::vector<int>& ranks) const override { ranks.push_back(peer_); }

  // What the last message began with.
  uint64_t first() const { return first_; }

 private:
  // Between two who send as much to each other, what came clocks what leaves, as in a ring: a sender with all it may
  // have under way was measured at half the rate of an all-reduce, on 10 Gbit/s.
  uint64_t may_be_sent() const { return count_.in == 0 ? count_.out : std::min(count_.out, received_ + kUnderWay); }
  static int channel(uint64_t message) { return static_cast<int>(message % kChannels); }
  bool all_left() {
    for (uint64_t i = 0; i < std::min(kChannels, sent_); ++i) {
      if (transport_.sent(peer_, channel(i)) != transport_.posted(peer_, channel(i))) return false;
    }
    return true;
  }

  Messages& transport_;
  const int peer_;
  const std::byte* data_;
  const size_t bytes_;
  const Count count_;
  uint64_t posted_ = 0, sent_ = 0, received_ = 0, first_ = 0;
};

// A pair's measurements. The lower rank leads: it tells the other what comes next in the first word of its messages.
struct Pair {
  Messages& transport;
  const int peer;
  const bool leads;
  const size_t long_bytes, slice_bytes;
  const double repeat_for_us;
  std::vector<std::byte> memory;
  double short_us = 0, long_us = 0;  // one way, kShort and long_bytes
  double per_message_us = 0;         // of a stream of short ones
  // Of a stream of slices: its bytes, and how long it took when it came first and, the lower quartile, after that.
  double streamed_bytes = 0, first_us = 0, again_us = 0;

  Pair(CalibrationSite site, int other, double budget_us)
      : transport(*site.transport),
        peer(other),
        leads(transport.rank() < other),
        long_bytes(std::min(site.slice_bytes, kLong)),
        slice_bytes(site.slice_bytes),
        repeat_for_us(budget_us),
        memory(std::max(slice_bytes, kShort)) {}
  const std::byte* saying(uint64_t word) {
    std::memcpy(memory.data(), &word, sizeof word);
    return memory.data();
  }
};

double quantile(std::vector<double> times, double share) {
  const auto at = times.begin() + static_cast<std::ptrdiff_t>(share * static_cast<double>(times.size()));
  std::nth_element(times.begin(), at, times.end());
  return *at;
}

// Half a round trip, the lower quartile: waits that fell asleep come in bursts that calls in a row do not have. The
// leader's words are "one more" until enough were made or time is up.
Task ping_pong(Pair& pair, size_t bytes, uint64_t most, double& one_way_us) {
  std::vector<double> trips;
  const auto begin = Clock::now();
  for (bool more = true; more;) {
    if (pair.leads) {
      more = trips.size() < most && microseconds_since(begin) < kPingsUs;
      const auto sent = Clock::now();
      Exchange there(pair.transport, pair.peer, pair.saying(more ? 1 : 0), bytes, {1, 1});
      co_await there;
      trips.push_back(microseconds_since(sent));
    } else {
      Exchange there(pair.transport, pair.peer, nullptr, bytes, {0, 1});
      co_await there;
      more = there.first() != 0;
      Exchange back(pair.transport, pair.peer, pair.memory.data(), bytes, {1, 0});
      co_await back;
    }
  }
  if (!trips.empty()) one_way_us = quantile(std::move(trips), 0.25) / 2;
}

// `count` messages each way at once.
Task stream(Pair& pair, size_t bytes, uint64_t count, double& time_us) {
  const auto begin = Clock::now();
  Exchange both(pair.transport, pair.peer, pair.memory.data(), bytes, {count, count});
  co_await both;
  time_us = microseconds_since(begin);
}

// What comes next, which the leader says.
Task agree_on(Pair& pair, uint64_t& word) {
  Exchange told(pair.transport, pair.peer, pair.leads ? pair.saying(word) : nullptr, kShort,
                {pair.leads ? 1u : 0u, pair.leads ? 0u : 1u});
  co_await told;
  if (!pair.leads) word = told.first();
}

// Streams of growing length, while they are short: connections begin slowly. Then the longest again and again.
Task streams(Pair& pair) {
  uint64_t count = kFirstStream;
  for (;;) {
    co_await stream(pair, pair.slice_bytes, count, pair.first_us);
    pair.streamed_bytes = static_cast<double>(count * pair.slice_bytes);
    uint64_t next = pair.leads && pair.first_us * kStreamGrowth < kStreamUs ? count * kStreamGrowth : 0;
    co_await agree_on(pair, next);
    if (next == 0) break;
    count = next;
  }
  std::vector<double> times;
  const auto begin = Clock::now();
  for (uint64_t more = 1; more != 0;) {
    co_await stream(pair, pair.slice_bytes, count, times.emplace_back());
    more = pair.leads && microseconds_since(begin) < pair.repeat_for_us ? 1 : 0;
    co_await agree_on(pair, more);
  }
  pair.again_us = quantile(std::move(times), 0.25);
}

Task measure_pair(Pair& pair) {
  double unused = 0;
  // The first messages make the connection, and long ones widen its window.
  co_await ping_pong(pair, kShort, 2, unused);
  co_await ping_pong(pair, pair.long_bytes, 2, unused);
  co_await streams(pair);
  co_await ping_pong(pair, kShort, kPings, pair.short_us);
  co_await ping_pong(pair, pair.long_bytes, kLongPings, pair.long_us);
  double time_us = 0;
  co_await stream(pair, kShort, kShortStream, time_us);
  pair.per_message_us = time_us / kShortStream;
}

// Overheads are the CPU's part of a short message, sender's and receiver's alike; alpha is the rest of its way.
plan::LinkModel link_of(const Pair& pair, const plan::LinkModel& fallback) {
  plan::LinkModel link = fallback;
  if (pair.streamed_bytes <= 0) return link;
  const double beta = std::max(0.5 * pair.again_us, pair.again_us - pair.long_us) / pair.streamed_bytes;
  link.overhead_us = std::min(pair.per_message_us, pair.short_us) / 2;
  link.alpha_us = std::max(0.0, pair.short_us - 2 * link.overhead_us);
  link.beta_us_per_byte = beta;
  link.transit_us_per_byte = std::max(0.0, pair.long_us - pair.short_us) / static_cast<double>(pair.long_bytes);
  // What a link's reserve let pass when the stream came first. Less than a message cannot be told from noise.
  const double burst = pair.streamed_bytes - std::max(0.0, pair.first_us - pair.long_us) / beta;
  link.burst_bytes = burst < static_cast<double>(pair.slice_bytes) ? 0 : burst;
  return link;
}

double measure_gamma() {
  std::vector<float> a(kReducedBytes / sizeof(float), 1.0f), b(a);
  double best = 1e9;
  for (int again = 0; again < 3; ++again) {
    const auto begin = Clock::now();
    kernels::reduce2(a.data(), a.data(), b.data(), a.size(), DType::kFloat32, ReduceOp::kMax);
    best = std::min(best, microseconds_since(begin));
  }
  return best / kReducedBytes;
}

// Ranks of each node, in order of rank.
std::map<uint32_t, std::vector<int>> ranks_of_nodes(const plan::Topology& topology) {
  std::map<uint32_t, std::vector<int>> nodes;
  for (uint32_t rank = 0; rank < topology.num_ranks; ++rank) {
    nodes[topology.node_of_rank[rank]].push_back(static_cast<int>(rank));
  }
  return nodes;
}

// The neighbour of ranks[i] where they are paired off in order; -1 for one that is left over or not among them.
int partner(const std::vector<int>& ranks, int rank) {
  const auto at = std::find(ranks.begin(), ranks.end(), rank);
  if (at == ranks.end()) return -1;
  const size_t other = static_cast<size_t>(at - ranks.begin()) ^ 1;
  return other < ranks.size() ? ranks[other] : -1;
}

// Messages from several senders at once.
struct All final : Pollable {
  std::vector<Exchange> from;
  bool poll(bool& moved) override {
    return std::count_if(from.begin(), from.end(), [&](Exchange& one) { return one.poll(moved); }) ==
           static_cast<std::ptrdiff_t>(from.size());
  }
  void waiting_for(std::vector<int>& ranks) const override {
    for (const Exchange& one : from) one.waiting_for(ranks);
  }
};

// Short messages round the ring of one rank per node, all at once: a step waits for the one before. Where nodes share
// cores, or somebody must be woken, that is more than between two of them, and it is what a collective's steps take.
Task hops(CalibrationSite site, std::vector<int> ring, plan::LinkModel& link) {
  Messages& transport = *site.transport;
  const auto at = static_cast<size_t>(std::find(ring.begin(), ring.end(), transport.rank()) - ring.begin());
  const int next = ring[(at + 1) % ring.size()], previous = ring[(at + ring.size() - 1) % ring.size()];
  const std::vector<std::byte> memory(kShort);
  std::vector<double> steps;
  for (uint64_t step = 0; step < kWarmHops + kHops; ++step) {
    const auto begin = Clock::now();
    All both;
    both.from.emplace_back(transport, next, memory.data(), kShort, Exchange::Count{1, 0});
    both.from.emplace_back(transport, previous, nullptr, kShort, Exchange::Count{0, 1});
    co_await both;
    if (step >= kWarmHops) steps.push_back(microseconds_since(begin));
  }
  link.alpha_us = std::max(link.alpha_us, quantile(std::move(steps), 0.5) - 2 * link.overhead_us);
}

// Rank 0 takes `count` slices from each of the senders at once, twice: connections begin slowly. count is rank
// 0's, told first.
Task crowd(CalibrationSite site, std::vector<int> senders, plan::LinkModel& link) {
  Messages& transport = *site.transport;
  const size_t bytes = site.slice_bytes;
  std::vector<std::byte> memory(std::max(bytes, kShort));
  const double share_us = static_cast<double>(bytes) * link.beta_us_per_byte * static_cast<double>(senders.size());
  const uint64_t count = std::clamp<uint64_t>(static_cast<uint64_t>(kCrowdUs / std::max(share_us, 1e-3)), 2, 64);
  for (const bool counts : {false, true}) {
    if (transport.rank() != 0) {
      Exchange told(transport, 0, nullptr, kShort, {0, 1});
      co_await told;
      Exchange out(transport, 0, memory.data(), bytes, {told.first(), 0});
      co_await out;
      continue;
    }
    std::memcpy(memory.data(), &count, sizeof count);
    for (const int sender : senders) {
      Exchange tell(transport, sender, memory.data(), kShort, {1, 0});
      co_await tell;
    }
    All all;
    for (const int sender : senders) {
      all.from.emplace_back(transport, sender, nullptr, bytes, Exchange::Count{0, count});
    }
    const auto begin = Clock::now();
    co_await all;
    if (!counts) continue;
    const double total = static_cast<double>(count * senders.size() * bytes);
    const double alone_us = std::max(1.0, (total - link.burst_bytes) * link.beta_us_per_byte);
    const double extra = microseconds_since(begin) / alone_us - 1;
    link.fan_in = std::clamp(extra / static_cast<double>(senders.size() - 1), 0.0, 1.0);
  }
}

}  // namespace

Task tell_everybody(CalibrationSite site, std::span<std::byte> data) {
  const Layout layout = Layout::even(data.size(), site.broadcast->input_chunks);
  Executor executor(*site.transport, site.broadcast,
                    {.input = data.data(), .output = data.data(), .input_layout = layout, .output_layout = layout},
                    site.slice_bytes);
  co_await executor;
}

Task measure_constants(CalibrationSite site, plan::Constants& result) {
  Messages& transport = *site.transport;
  const int rank = transport.rank();
  const auto nodes = ranks_of_nodes(*site.topology);
  std::vector<int> firsts;
  for (const auto& [node, ranks] : nodes) firsts.push_back(ranks.front());
  result.gamma_us_per_byte = measure_gamma();

  const std::vector<int>& local = nodes.at(site.topology->node_of_rank[rank]);
  if (const int peer = partner(local, rank); peer >= 0) {
    Pair pair(site, peer, kAgainInMemoryUs);
    co_await measure_pair(pair);
    plan::LinkModel link = link_of(pair, result.memory);
    // The CPU copies: there is no reserve, and a message's way is the copy.
    link.burst_bytes = 0;
    link.transit_us_per_byte = -1;
    result.memory = link;
  }
  if (const int peer = partner(firsts, rank); peer >= 0) {
    Pair pair(site, peer, kAgainUs);
    co_await measure_pair(pair);
    result.network = link_of(pair, result.network);
  }
  if (firsts.size() > 1 && std::find(firsts.begin(), firsts.end(), rank) != firsts.end()) {
    co_await hops(site, firsts, result.network);
  }
  if (firsts.size() > 2) {
    const std::vector<int> senders(firsts.begin() + 1, firsts.begin() + std::min<size_t>(firsts.size(), 1 + kCrowd));
    if (rank == 0 || std::find(senders.begin(), senders.end(), rank) != senders.end()) {
      co_await crowd(site, senders, result.network);
    }
  }
  co_await tell_everybody(site, std::as_writable_bytes(std::span(&result, 1)));
}

}  // namespace dcoll
