#include "plan/cost.h"

#include <algorithm>
#include <deque>
#include <queue>
#include <set>
#include <string>
#include <unordered_map>

#include "base/error.h"

namespace dcoll::plan {
namespace {

constexpr uint32_t kNone = ~uint32_t{0};

double chunks_of(const Schedule& schedule) { return std::max(schedule.input_chunks, schedule.output_chunks); }

class Simulation {
 public:
  Simulation(std::span<const Schedule> schedules, double slice_bytes, uint32_t rounds, uint32_t lanes,
             const Topology& topology)
      : topology_(topology),
        bytes_(slice_bytes),
        rounds_(rounds),
        cpu_free_(schedules.size(), 0.0),
        leaves_(1 + *std::max_element(topology.node_of_rank.begin(), topology.node_of_rank.end())),
        enters_(leaves_.size()) {
    for (const Schedule& schedule : schedules) {
      std::set<uint32_t> senders;
      for (uint32_t c = 0; c < schedule.channels.size(); ++c) {
        for (uint32_t lane = 0; lane < lanes; ++lane) add_lane(schedule, c, lane, lanes, senders);
      }
      fan_in_.push_back(senders.empty() ? 0.0 : static_cast<double>(senders.size() - 1));
    }
  }

  // When the last rank has finished.
  double run() {
    for (uint32_t lane = 0; lane < lanes_.size(); ++lane) schedule_next(lane);
    size_t steps_left = 0;
    for (const Lane& lane : lanes_) steps_left += lane.steps->size() * lane.rounds;
    while (!ready_.empty()) {
      const auto [at, lane] = ready_.top();
      ready_.pop();
      execute(lane, at);
      --steps_left;
      schedule_next(lane);
    }
    if (steps_left > 0) {
      throw ArgumentError("cannot predict a schedule that deadlocks: " + std::to_string(steps_left) +
                          " steps wait forever; verify() names them");
    }
    return *std::max_element(cpu_free_.begin(), cpu_free_.end());
  }

 private:
  struct Lane {
    uint32_t rank;
    const std::vector<Step>* steps;
    std::vector<uint32_t> in, out;  // FIFO of each step
    uint32_t rounds;                // of the schedule that are this lane's
    uint32_t step = 0, round = 0;
    double time = 0.0;
  };
  struct Fifo {
    uint32_t parked = kNone;  // the lane that waits for a message
    std::deque<double> arrivals;
  };
  using Entry = std::pair<double, uint32_t>;

  // Lane `number` of a channel runs every `lanes`-th round, on messages of its own.
  void add_lane(const Schedule& schedule, uint32_t index, uint32_t number, uint32_t lanes,
                std::set<uint32_t>& senders) {
    const Channel& channel = schedule.channels[index];
    if (channel.steps.empty() || rounds_ <= number) return;
    Lane lane{schedule.rank, &channel.steps, {}, {}, (rounds_ - number + lanes - 1) / lanes};
    const uint32_t base = number * kMaxScheduleChannels;
    for (const Step& step : channel.steps) {
      lane.in.push_back(receives(step.op) ? fifo(step.peer, schedule.rank, base + index) : kNone);
      lane.out.push_back(sends(step.op) ? fifo(schedule.rank, destination(step), base + send_channel(channel, index))
                                        : kNone);
      if (receives(step.op)) senders.insert(step.peer);
    }
    lanes_.push_back(std::move(lane));
  }

  uint32_t fifo(uint64_t src, uint64_t dst, uint32_t channel) {
    const uint64_t key = (src << 32) | (dst << 8) | channel;
    const auto [at, inserted] = fifo_ids_.try_emplace(key, static_cast<uint32_t>(fifos_.size()));
    if (inserted) fifos_.emplace_back();
    return at->second;
  }

  // Queues the lane's next step for the moment it becomes possible, or parks the lane until its message is posted.
  void schedule_next(uint32_t index) {
    Lane& lane = lanes_[index];
    if (lane.round == lane.rounds) return;
    double ready = lane.time;
    if (const uint32_t in = lane.in[lane.step]; in != kNone) {
      if (fifos_[in].arrivals.empty()) {
        fifos_[in].parked = index;
        return;
      }
      ready = std::max(ready, fifos_[in].arrivals.front());
    }
    ready_.push({ready, index});
  }

  void execute(uint32_t index, double ready) {
    Lane& lane = lanes_[index];
    const Step& step = (*lane.steps)[lane.step];
    double& cpu = cpu_free_[lane.rank];
    cpu = std::max(cpu, ready);
    if (const uint32_t in = lane.in[lane.step]; in != kNone) {
      fifos_[in].arrivals.pop_front();
      cpu += topology_.link(step.peer, lane.rank).overhead_us;
    }
    const double bytes = bytes_ * step.count;
    if (reduces(step.op) || step.dst != BufferId::kNone) cpu += bytes * topology_.gamma_us_per_byte;
    if (const uint32_t out = lane.out[lane.step]; out != kNone) post(lane.rank, destination(step), out, bytes, cpu);
    lane.time = cpu;
    if (++lane.step == lane.steps->size()) {
      lane.step = 0;
      ++lane.round;
    }
  }

  void post(uint32_t from, uint32_t to, uint32_t out, double bytes, double& cpu) {
    const LinkModel& link = topology_.link(from, to);
    const double transfer = bytes * link.beta_us_per_byte, crowded = transfer * (1 + link.fan_in * fan_in_[to]);
    cpu += link.overhead_us;
    double sent = 0.0;
    if (topology_.same_node(from, to)) {
      sent = cpu += crowded;
    } else {
      const double reserve = link.burst_bytes * link.beta_us_per_byte;
      sent = leaves_[topology_.node_of_rank[from]].pass(cpu, transfer, reserve);
      sent = enters_[topology_.node_of_rank[to]].pass(sent, crowded, reserve);
      sent += bytes * link.transit();
    }
    Fifo& fifo = fifos_[out];
    fifo.arrivals.push_back(sent + link.alpha_us);
    if (fifo.parked != kNone) {
      const uint32_t reader = fifo.parked;
      fifo.parked = kNone;
      schedule_next(reader);
    }
  }

  const Topology& topology_;
  double bytes_;
  uint32_t rounds_;
  std::vector<Lane> lanes_;
  std::vector<Fifo> fifos_;
  std::unordered_map<uint64_t, uint32_t> fifo_ids_;
  std::vector<double> fan_in_;              // per rank: senders beyond the first
  std::vector<double> cpu_free_;            // per rank
  std::vector<Direction> leaves_, enters_;  // per node: its link, both ways
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> ready_;
};

// Chunks that pass the busiest direction of any node's link: in a row of calls, none is faster than that takes.
double busiest_link_chunks(std::span<const Schedule> all_ranks, const Topology& topology) {
  std::vector<double> leaving(1 + *std::max_element(topology.node_of_rank.begin(), topology.node_of_rank.end()), 0.0);
  std::vector<double> entering(leaving.size(), 0.0);
  for (const Schedule& schedule : all_ranks) {
    for (const Channel& channel : schedule.channels) {
      for (const Step& step : channel.steps) {
        if (!sends(step.op) || topology.same_node(schedule.rank, destination(step))) continue;
        leaving[topology.node_of_rank[schedule.rank]] += step.count;
        entering[topology.node_of_rank[destination(step)]] += step.count;
      }
    }
  }
  return std::max(*std::max_element(leaving.begin(), leaving.end()),
                  *std::max_element(entering.begin(), entering.end()));
}

}  // namespace

double predict_us(std::span<const Schedule> all_ranks, uint64_t bytes, const Topology& topology, uint64_t slice_bytes,
                  uint32_t lanes, double before_us) {
  if (all_ranks.size() != topology.num_ranks || topology.node_of_rank.size() != topology.num_ranks ||
      all_ranks.empty()) {
    throw ArgumentError("the topology has " + std::to_string(topology.num_ranks) + " ranks and places " +
                        std::to_string(topology.node_of_rank.size()) + ", but there are schedules for " +
                        std::to_string(all_ranks.size()) + ": give one of each per rank");
  }
  if (slice_bytes == 0) throw ArgumentError("slice_bytes is 0; messages must be at least one byte long");
  if (lanes == 0) throw ArgumentError("lanes is 0; a channel has at least one");
  if (bytes == 0) return before_us;
  const double chunk_bytes = static_cast<double>(bytes) / chunks_of(all_ranks[0]);
  const auto chunk_whole = static_cast<uint64_t>(chunk_bytes);
  const uint64_t slice = std::max<uint64_t>(1, slice_bytes / all_ranks[0].longest_range);
  const uint64_t rounds = std::max<uint64_t>(1, (chunk_whole + slice - 1) / slice);
  const double message_bytes = chunk_bytes / static_cast<double>(rounds);
  auto simulate = [&](uint32_t some) { return Simulation(all_ranks, message_bytes, some, lanes, topology).run(); };
  const double link_us = busiest_link_chunks(all_ranks, topology) * chunk_bytes * topology.network.beta_us_per_byte;
  return std::max(link_us, before_us + extrapolate(rounds, lanes, simulate));
}

}  // namespace dcoll::plan
