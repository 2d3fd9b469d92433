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
// Once the pipeline is full every further round adds the same time: beyond kManyRounds, it is the difference between
// that many and kFewRounds, both simulated.
constexpr uint32_t kFewRounds = 2, kManyRounds = 5;

double chunks_of(const Schedule& schedule) { return std::max(schedule.input_chunks, schedule.output_chunks); }

class Simulation {
 public:
  Simulation(std::span<const Schedule> schedules, double slice_bytes, uint32_t rounds, const Topology& topology)
      : topology_(topology),
        bytes_(slice_bytes),
        rounds_(rounds),
        cpu_free_(schedules.size(), 0.0),
        card_free_(1 + *std::max_element(topology.node_of_rank.begin(), topology.node_of_rank.end()), 0.0) {
    for (const Schedule& schedule : schedules) {
      std::set<uint32_t> senders;
      for (uint32_t c = 0; c < schedule.channels.size(); ++c) add_lane(schedule, c, senders);
      fan_in_.push_back(senders.empty() ? 0.0 : static_cast<double>(senders.size() - 1));
    }
  }

  // When the last rank has finished.
  double run() {
    for (uint32_t lane = 0; lane < lanes_.size(); ++lane) schedule_next(lane);
    size_t steps_left = 0;
    for (const Lane& lane : lanes_) steps_left += lane.steps->size() * rounds_;
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
    uint32_t step = 0, round = 0;
    double time = 0.0;
  };
  struct Fifo {
    uint32_t parked = kNone;  // the lane that waits for a message
    std::deque<double> arrivals;
  };
  using Entry = std::pair<double, uint32_t>;

  void add_lane(const Schedule& schedule, uint32_t index, std::set<uint32_t>& senders) {
    const Channel& channel = schedule.channels[index];
    if (channel.steps.empty()) return;
    Lane lane{schedule.rank, &channel.steps, {}, {}};
    for (const Step& step : channel.steps) {
      lane.in.push_back(receives(step.op) ? fifo(step.peer, schedule.rank, index) : kNone);
      lane.out.push_back(sends(step.op) ? fifo(schedule.rank, destination(step), send_channel(channel, index)) : kNone);
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
    if (lane.round == rounds_) return;
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
    const double transfer = bytes * link.beta_us_per_byte * (1 + link.fan_in * fan_in_[to]);
    cpu += link.overhead_us;
    double sent = 0.0;
    if (topology_.same_node(from, to)) {
      sent = cpu += transfer;
    } else {
      double& card = card_free_[topology_.node_of_rank[from]];
      sent = card = std::max(card, cpu) + transfer;
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
  std::vector<double> fan_in_;     // per rank: senders beyond the first
  std::vector<double> cpu_free_;   // per rank
  std::vector<double> card_free_;  // per node
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> ready_;
};

}  // namespace

double predict_us(std::span<const Schedule> all_ranks, uint64_t bytes, const Topology& topology, uint64_t slice_bytes) {
  if (all_ranks.size() != topology.num_ranks || topology.node_of_rank.size() != topology.num_ranks ||
      all_ranks.empty()) {
    throw ArgumentError("the topology has " + std::to_string(topology.num_ranks) + " ranks and places " +
                        std::to_string(topology.node_of_rank.size()) + ", but there are schedules for " +
                        std::to_string(all_ranks.size()) + ": give one of each per rank");
  }
  if (slice_bytes == 0) throw ArgumentError("slice_bytes is 0; messages must be at least one byte long");
  if (bytes == 0) return 0.0;
  const double chunk_bytes = static_cast<double>(bytes) / chunks_of(all_ranks[0]);
  const auto chunk_whole = static_cast<uint64_t>(chunk_bytes);
  const uint64_t slice = std::max<uint64_t>(1, slice_bytes / all_ranks[0].longest_range);
  const uint64_t rounds = std::max<uint64_t>(1, (chunk_whole + slice - 1) / slice);
  const double message_bytes = chunk_bytes / static_cast<double>(rounds);
  auto simulate = [&](uint32_t some) { return Simulation(all_ranks, message_bytes, some, topology).run(); };
  if (rounds <= kManyRounds) return simulate(static_cast<uint32_t>(rounds));
  const double many = simulate(kManyRounds);
  const double pace = (many - simulate(kFewRounds)) / (kManyRounds - kFewRounds);
  return many + static_cast<double>(rounds - kManyRounds) * pace;
}

double sent_share(const Schedule& schedule) {
  size_t chunks = 0;
  for (const Channel& channel : schedule.channels) {
    for (const Step& step : channel.steps) chunks += sends(step.op) ? step.count : 0;
  }
  return static_cast<double>(chunks) / chunks_of(schedule);
}

}  // namespace dcoll::plan
