#include "engine/calibration.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "base/clock.h"
#include "engine/executor.h"
#include "kernels/reduce.h"

namespace dcoll {
namespace {

// The first of the schedules' channels: what is measured is what they use.
constexpr int kChannel = 0;
constexpr size_t kShort = 8;
// A long message, but one that leaves at once: what a library does about longer ones (Open MPI asks the receiver first,
// from 64 KiB) is latency, which many messages under way hide.
constexpr size_t kLong = size_t{32} << 10;
constexpr uint64_t kPings = 24, kLongPings = 8;
constexpr double kPingsUs = 15e3;   // of one size, at most
constexpr double kStreamUs = 80e3;  // no longer stream is begun if it were to take more
constexpr uint64_t kFirstStream = 4, kStreamGrowth = 4;
constexpr uint64_t kShortStream = 64;
constexpr double kCrowdUs = 8e3;
constexpr uint32_t kCrowd = 3;
constexpr size_t kReducedBytes = size_t{2} << 20;

size_t long_bytes_of(const CalibrationSite& site) { return std::min(site.slice_bytes, kLong); }

double microseconds_since(Clock::time_point begin) { return 1e6 * seconds_between(begin, Clock::now()); }

// Some messages to a peer and some from it, at once, as many under way as the transport takes.
class Exchange final : public Pollable {
 public:
  struct Count {
    uint64_t out, in;
  };
  // `data` is sent, again and again; it stays unchanged until the exchange is over.
  Exchange(Transport& transport, int peer, const std::byte* data, size_t bytes, Count count)
      : transport_(transport), peer_(peer), data_(data), bytes_(bytes), count_(count) {}

  bool poll(bool& moved) override {
    while (posted_ < count_.in && transport_.post_recv(peer_, kChannel, nullptr, bytes_)) ++posted_;
    while (sent_ < count_.out && transport_.post_send(peer_, kChannel, data_, bytes_)) {
      ++sent_;
      moved = true;
    }
    while (received_ < posted_) {
      const std::byte* message = transport_.front(peer_, kChannel);
      if (message == nullptr) break;
      std::memcpy(&first_, message, sizeof first_);
      transport_.pop(peer_, kChannel);
      ++received_;
      moved = true;
    }
    return received_ == count_.in && sent_ == count_.out &&
           transport_.sent(peer_, kChannel) == transport_.posted(peer_, kChannel);
  }
  void waiting_for(std::vector<int>& ranks) const override { ranks.push_back(peer_); }

  // What the last message began with.
  uint64_t first() const { return first_; }

 private:
  Transport& transport_;
  const int peer_;
  const std::byte* data_;
  const size_t bytes_;
  const Count count_;
  uint64_t posted_ = 0, sent_ = 0, received_ = 0, first_ = 0;
};

// A pair's measurements. The lower rank leads: it tells the other what comes next in the first word of its messages.
struct Pair {
  Transport& transport;
  const int peer;
  const bool leads;
  const size_t long_bytes;
  std::vector<std::byte> memory;
  double short_us = 0, long_us = 0;  // one way, kShort and long_bytes
  double per_message_us = 0;         // of a stream of short ones
  double beta = 0, burst_bytes = 0;  // of a stream of long ones

  Pair(Transport& way, int other, bool first, size_t most)
      : transport(way), peer(other), leads(first), long_bytes(most), memory(std::max(most, kShort)) {}
  const std::byte* saying(uint64_t word) {
    std::memcpy(memory.data(), &word, sizeof word);
    return memory.data();
  }
};

// Half the median round trip. The leader's words are "one more" until enough were made or time is up.
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
  if (!trips.empty()) {
    std::nth_element(trips.begin(), trips.begin() + trips.size() / 2, trips.end());
    one_way_us = trips[trips.size() / 2] / 2;
  }
}

// `count` messages each way at once.
Task stream(Pair& pair, size_t bytes, uint64_t count, double& time_us) {
  const auto begin = Clock::now();
  Exchange both(pair.transport, pair.peer, pair.memory.data(), bytes, {count, count});
  co_await both;
  time_us = microseconds_since(begin);
}

// Streams of growing length, while they are short. The rate is that of what the longest has more than the one before:
// the start, and what a link's reserve let pass at once, are in both.
Task streams(Pair& pair) {
  double last_us = 0, last_bytes = 0;
  uint64_t count = kFirstStream;
  for (;;) {
    if (pair.leads && last_us * kStreamGrowth > kStreamUs) count = 0;
    Exchange told(pair.transport, pair.peer, pair.leads ? pair.saying(count) : nullptr, kShort,
                  {pair.leads ? 1u : 0u, pair.leads ? 0u : 1u});
    co_await told;
    if (!pair.leads) count = told.first();
    if (count == 0) co_return;
    double time_us = 0;
    Nested whole(stream(pair, pair.long_bytes, count, time_us));
    co_await whole;
    const double bytes = static_cast<double>(count * pair.long_bytes);
    pair.beta = std::max(time_us - last_us, 0.05 * time_us) / (bytes - last_bytes);
    pair.burst_bytes = std::max(0.0, bytes - std::max(0.0, time_us - pair.long_us) / pair.beta);
    last_us = time_us;
    last_bytes = bytes;
    count *= kStreamGrowth;
  }
}

Task measure_pair(Pair& pair) {
  double unused = 0;
  // The first messages make the connection, and long ones widen its window.
  Nested warm(ping_pong(pair, kShort, 2, unused));
  co_await warm;
  Nested warm_long(ping_pong(pair, pair.long_bytes, 2, unused));
  co_await warm_long;
  Nested brief(ping_pong(pair, kShort, kPings, pair.short_us));
  co_await brief;
  Nested whole(ping_pong(pair, pair.long_bytes, kLongPings, pair.long_us));
  co_await whole;
  double time_us = 0;
  Nested many(stream(pair, kShort, kShortStream, time_us));
  co_await many;
  pair.per_message_us = time_us / kShortStream;
  Nested rates(streams(pair));
  co_await rates;
}

// Overheads are the CPU's part of a short message, sender's and receiver's alike; alpha is the rest of its way.
plan::LinkModel link_of(const Pair& pair, const plan::LinkModel& fallback) {
  plan::LinkModel link = fallback;
  if (pair.beta <= 0) return link;
  link.overhead_us = std::min(pair.per_message_us, pair.short_us) / 2;
  link.alpha_us = std::max(0.0, pair.short_us - 2 * link.overhead_us);
  link.beta_us_per_byte = pair.beta;
  link.transit_us_per_byte = std::max(0.0, pair.long_us - pair.short_us) / static_cast<double>(pair.long_bytes);
  // A reserve of less than a message cannot be told from noise.
  link.burst_bytes = pair.burst_bytes < static_cast<double>(pair.long_bytes) ? 0 : pair.burst_bytes;
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

// Rank 0 takes `count` long messages from each of the senders at once, twice: connections begin slowly. count is rank
// 0's, told first.
Task crowd(CalibrationSite site, std::vector<int> senders, plan::LinkModel& link) {
  Transport& transport = *site.transport;
  const size_t bytes = long_bytes_of(site);
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

Task tell_everybody(CalibrationSite site, std::vector<std::byte>& data) {
  const Layout layout = Layout::even(data.size(), site.broadcast->input_chunks);
  Executor executor(*site.transport, site.broadcast,
                    {.input = data.data(), .output = data.data(), .input_layout = layout, .output_layout = layout},
                    site.slice_bytes);
  co_await executor;
}

Task measure_constants(CalibrationSite site, plan::Constants& result) {
  Transport& transport = *site.transport;
  const int rank = transport.rank();
  const auto nodes = ranks_of_nodes(*site.topology);
  std::vector<int> firsts;
  for (const auto& [node, ranks] : nodes) firsts.push_back(ranks.front());
  result.gamma_us_per_byte = measure_gamma();

  const std::vector<int>& local = nodes.at(site.topology->node_of_rank[rank]);
  if (const int peer = partner(local, rank); peer >= 0) {
    Pair pair(transport, peer, rank < peer, long_bytes_of(site));
    Nested measured(measure_pair(pair));
    co_await measured;
    plan::LinkModel link = link_of(pair, result.memory);
    // The CPU copies: there is no reserve, and a message's way is the copy.
    link.burst_bytes = 0;
    link.transit_us_per_byte = -1;
    result.memory = link;
  }
  if (const int peer = partner(firsts, rank); peer >= 0) {
    Pair pair(transport, peer, rank < peer, long_bytes_of(site));
    Nested measured(measure_pair(pair));
    co_await measured;
    result.network = link_of(pair, result.network);
  }
  if (firsts.size() > 2) {
    const std::vector<int> senders(firsts.begin() + 1, firsts.begin() + std::min<size_t>(firsts.size(), 1 + kCrowd));
    if (rank == 0 || std::find(senders.begin(), senders.end(), rank) != senders.end()) {
      Nested crowded(crowd(site, senders, result.network));
      co_await crowded;
    }
  }
  std::vector<std::byte> record(sizeof result);
  std::memcpy(record.data(), &result, sizeof result);
  Nested told(tell_everybody(site, record));
  co_await told;
  std::memcpy(static_cast<void*>(&result), record.data(), sizeof result);
}

}  // namespace dcoll
