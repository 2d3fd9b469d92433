#include "plan/cost.h"

#include <algorithm>
#include <queue>
#include <string>
#include <unordered_map>

#include "base/error.h"

namespace dcoll::plan {
namespace {

constexpr uint32_t kNone = ~uint32_t{0};

// One direction of a link: a token bucket, kept as the moment at which its reserve will be whole again (GCRA).
struct Direction {
  double whole_at = 0.0;

  // When a message that could pass at `now` begins to.
  double pass(double now, double cost_us, double reserve_us) {
    const double begin = std::max(now, whole_at - reserve_us);
    whole_at = std::max(whole_at, now) + cost_us;
    return begin;
  }
};

class Simulation {
 public:
  Simulation(const Machine& machine, std::span<const Schedule> schedules, double slice_bytes, uint32_t rounds,
             uint32_t lanes)
      : machine_(machine),
        schedules_(schedules),
        n_(static_cast<uint32_t>(machine.seats.size())),
        bytes_(slice_bytes),
        rounds_(rounds),
        num_lanes_(std::min(lanes, rounds)),
        cpu_free_(machine.simulated, 0.0) {
    uint32_t cards = 0, racks = 0;
    for (uint32_t rank = 0; rank < machine.simulated; ++rank) {
      cards = std::max(cards, machine.seats[rank].card + 1);
      racks = std::max(racks, machine.seats[rank].rack + 1);
      add_rank(rank);
    }
    leaves_.resize(cards);
    enters_.resize(cards);
    racks_up_.resize(racks);
    racks_down_.resize(racks);
    for (uint32_t program = 0; program < programs_.size(); ++program) add_lanes(program);
    fifos_.resize(fifo_ids_.size() * num_lanes_);
  }

  // Until the last rank has finished.
  Run run() {
    for (uint32_t lane = 0; lane < lanes_.size(); ++lane) schedule_next(lane);
    uint64_t steps = 0, done = 0;
    for (const Lane& lane : lanes_) steps += programs_[lane.program].steps->size() * lane.rounds;
    for (; !ready_.empty(); ++done) {
      const auto [at, lane] = ready_.top();
      ready_.pop();
      execute(lane, at);
      schedule_next(lane);
    }
    if (done < steps) {
      throw ArgumentError("cannot predict a schedule that deadlocks: " + std::to_string(steps - done) +
                          " steps wait forever; verify() names them");
    }
    return {*std::max_element(cpu_free_.begin(), cpu_free_.end()), done};
  }

  // Chunks per round that pass the busiest card, out or in.
  double busiest_card_chunks() const {
    std::vector<double> out(leaves_.size(), 0.0), into(leaves_.size(), 0.0);
    for (const Program& program : programs_) {
      const uint32_t rank = program.rank;
      for (const Step& step : *program.steps) {
        if (sends(step.op) && !same_node(rank, peer(rank, destination(step)))) out[card(rank)] += step.count;
        if (receives(step.op) && !same_node(rank, peer(rank, step.peer))) into[card(rank)] += step.count;
      }
    }
    return std::max(*std::max_element(out.begin(), out.end()), *std::max_element(into.begin(), into.end()));
  }

 private:
  // A channel of a rank, whose rounds several lanes run in turn.
  struct Program {
    uint32_t rank;
    const std::vector<Step>* steps;
    std::vector<uint32_t> in, out;  // FIFO of each step
  };
  struct Lane {
    uint32_t program, number;
    uint32_t rounds;  // of the program that are this lane's
    uint32_t step = 0, round = 0;
    double time = 0.0;
  };
  struct Fifo {
    uint32_t parked = kNone;  // the lane that waits for a message
    uint32_t taken = 0;       // of the arrivals
    std::vector<double> arrivals;

    bool empty() const { return taken == arrivals.size(); }
    void pop() {
      if (++taken < arrivals.size()) return;
      arrivals.clear();
      taken = 0;
    }
  };
  using Entry = std::pair<double, uint32_t>;

  bool stands_in() const { return schedules_.size() < n_; }
  uint32_t peer(uint32_t rank, uint32_t named) const {
    return stands_in() ? (rank + named + n_ - schedules_[0].rank) % n_ : named;
  }
  uint32_t card(uint32_t rank) const { return machine_.seats[rank].card; }
  bool same_node(uint32_t a, uint32_t b) const { return machine_.seats[a].node == machine_.seats[b].node; }
  const LinkModel& link(uint32_t a, uint32_t b) const {
    return same_node(a, b) ? machine_.constants.memory : machine_.constants.network;
  }

  void add_rank(uint32_t rank) {
    const Schedule& schedule = schedules_[stands_in() ? 0 : rank];
    std::vector<uint32_t> senders;
    for (uint32_t c = 0; c < schedule.channels.size(); ++c) {
      const Channel& channel = schedule.channels[c];
      if (channel.steps.empty()) continue;
      Program program{rank, &channel.steps, {}, {}};
      for (const Step& step : channel.steps) {
        program.in.push_back(receives(step.op) ? fifo(peer(rank, step.peer), rank, c) : kNone);
        program.out.push_back(sends(step.op) ? fifo(rank, peer(rank, destination(step)), send_channel(channel, c))
                                             : kNone);
        if (receives(step.op)) senders.push_back(step.peer);
      }
      programs_.push_back(std::move(program));
    }
    std::sort(senders.begin(), senders.end());
    const auto distinct = std::unique(senders.begin(), senders.end()) - senders.begin();
    fan_in_.push_back(distinct == 0 ? 0.0 : static_cast<double>(distinct - 1));
  }

  // Each runs every num_lanes_-th round, on messages of its own.
  void add_lanes(uint32_t program) {
    for (uint32_t number = 0; number < num_lanes_; ++number) {
      lanes_.push_back({program, number, (rounds_ - number + num_lanes_ - 1) / num_lanes_});
    }
  }

  // All groups of simulated ranks act alike: a FIFO is known by its reader among them and by the distance it is from.
  uint32_t fifo(uint32_t from, uint32_t to, uint64_t channel) {
    const uint64_t key = (channel * n_ + (to + n_ - from) % n_) * machine_.simulated + to % machine_.simulated;
    return fifo_ids_.try_emplace(key, static_cast<uint32_t>(fifo_ids_.size())).first->second;
  }
  Fifo& fifo_of(const Lane& lane, uint32_t id) { return fifos_[size_t{id} * num_lanes_ + lane.number]; }

  // Queues the lane's next step for the moment it becomes possible, or parks the lane until its message is posted.
  void schedule_next(uint32_t index) {
    const Lane& lane = lanes_[index];
    if (lane.round == lane.rounds) return;
    double ready = lane.time;
    if (const uint32_t in = programs_[lane.program].in[lane.step]; in != kNone) {
      Fifo& fifo = fifo_of(lane, in);
      if (fifo.empty()) {
        fifo.parked = index;
        return;
      }
      ready = std::max(ready, fifo.arrivals[fifo.taken]);
    }
    ready_.push({ready, index});
  }

  void execute(uint32_t index, double ready) {
    Lane& lane = lanes_[index];
    const Program& program = programs_[lane.program];
    const Step& step = (*program.steps)[lane.step];
    const double bytes = bytes_ * step.count;
    double& cpu = cpu_free_[program.rank];
    cpu = std::max(cpu, ready);
    if (const uint32_t in = program.in[lane.step]; in != kNone) {
      const uint32_t from = peer(program.rank, step.peer);
      fifo_of(lane, in).pop();
      cpu += link(from, program.rank).overhead_us;
      if (!same_node(from, program.rank)) cpu += bytes * machine_.decode_us_per_byte;
    }
    if (reduces(step.op) || step.dst != BufferId::kNone) cpu += bytes * machine_.constants.gamma_us_per_byte;
    if (const uint32_t out = program.out[lane.step]; out != kNone) {
      post(program.rank, peer(program.rank, destination(step)), fifo_of(lane, out), bytes, cpu);
    }
    lane.time = cpu;
    if (++lane.step == program.steps->size()) {
      lane.step = 0;
      ++lane.round;
    }
  }

  void post(uint32_t from, uint32_t to, Fifo& out, double bytes, double& cpu) {
    const LinkModel& over = link(from, to);
    const double crowd = 1 + over.fan_in * fan_in_[to % machine_.simulated];
    double sent = 0.0;
    if (same_node(from, to)) {
      cpu += over.overhead_us;
      sent = cpu += bytes * over.beta_us_per_byte * crowd;
    } else {
      cpu += over.overhead_us + bytes * machine_.encode_us_per_byte;
      sent = cross(from, to, over, bytes / machine_.compression, crowd, cpu);
    }
    out.arrivals.push_back(sent + over.alpha_us);
    if (out.parked != kNone) {
      const uint32_t reader = out.parked;
      out.parked = kNone;
      schedule_next(reader);
    }
  }

  // From node to node: out of a card, up and down where racks differ, into a card.
  double cross(uint32_t from, uint32_t to, const LinkModel& over, double bytes, double crowd, double now) {
    const double transfer = bytes * over.beta_us_per_byte * machine_.flows_per_card;
    const double reserve = over.burst_bytes * over.beta_us_per_byte;
    now = leaves_[card(from)].pass(now, transfer, reserve);
    if (machine_.seats[from].rack != machine_.seats[to].rack) {
      const double uplink = transfer * machine_.oversubscription / machine_.cards_per_rack;
      now = racks_up_[machine_.seats[from % machine_.simulated].rack].pass(now, uplink, reserve);
      now = racks_down_[machine_.seats[to % machine_.simulated].rack].pass(now, uplink, reserve) +
            machine_.spine_alpha_us;
    }
    now = enters_[card(to)].pass(now, transfer * crowd, reserve);
    return now + bytes * over.transit() * machine_.flows_per_card;
  }

  const Machine& machine_;
  const std::span<const Schedule> schedules_;
  const uint32_t n_;
  const double bytes_;
  const uint32_t rounds_, num_lanes_;
  std::vector<Program> programs_;
  std::vector<Lane> lanes_;
  std::vector<Fifo> fifos_;
  std::unordered_map<uint64_t, uint32_t> fifo_ids_;
  std::vector<double> fan_in_;              // per rank: senders beyond the first
  std::vector<double> cpu_free_;            // per rank
  std::vector<Direction> leaves_, enters_;  // per card: its link, both ways
  std::vector<Direction> racks_up_, racks_down_;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> ready_;
};

}  // namespace

Run simulate_on(const Machine& machine, std::span<const Schedule> schedules, double bytes, uint64_t slice_bytes,
                uint32_t lanes, double before_us) {
  if (slice_bytes == 0) throw ArgumentError("slice_bytes is 0; messages must be at least one byte long");
  if (lanes == 0) throw ArgumentError("lanes is 0; a channel has at least one");
  if (bytes <= 0) return {before_us, 0};
  const Schedule& any = schedules[0];
  const double chunk_bytes = bytes / std::max(any.input_chunks, any.output_chunks);
  const uint64_t slice = std::max<uint64_t>(1, slice_bytes / any.longest_range);
  const uint64_t rounds = std::max<uint64_t>(1, (static_cast<uint64_t>(chunk_bytes) + slice - 1) / slice);
  double chunks = 0;
  uint64_t events = 0;
  const auto run = [&](uint64_t some) {
    Simulation simulation(machine, schedules, chunk_bytes / static_cast<double>(rounds), static_cast<uint32_t>(some),
                          lanes);
    chunks = simulation.busiest_card_chunks();
    const Run done = simulation.run();
    events += done.events;
    return done.us;
  };
  // Once the pipeline is full every further round adds the same time: beyond five per lane, it is the difference
  // between that many and two, both run.
  const uint32_t few = 2 * lanes, many = 5 * lanes;
  double us = run(std::min<uint64_t>(rounds, many));
  if (rounds > many) us += static_cast<double>(rounds - many) * ((us - run(few)) / (many - few));
  // One call of many in a row: links cannot live on their reserves.
  const double wire_bytes = chunks * chunk_bytes / machine.compression * machine.flows_per_card;
  return {std::max(wire_bytes * machine.constants.network.beta_us_per_byte, before_us + us), events};
}

double predict_us(std::span<const Schedule> all_ranks, uint64_t bytes, const Topology& topology, uint64_t slice_bytes,
                  uint32_t lanes, double before_us) {
  if (all_ranks.size() != topology.num_ranks || topology.node_of_rank.size() != topology.num_ranks ||
      all_ranks.empty()) {
    throw ArgumentError("the topology has " + std::to_string(topology.num_ranks) + " ranks and places " +
                        std::to_string(topology.node_of_rank.size()) + ", but there are schedules for " +
                        std::to_string(all_ranks.size()) + ": give one of each per rank");
  }
  Machine machine{.constants = topology, .seats = {}, .simulated = topology.num_ranks};
  for (const uint32_t node : topology.node_of_rank) machine.seats.push_back({.node = node, .card = node});
  return simulate_on(machine, all_ranks, static_cast<double>(bytes), slice_bytes, lanes, before_us).us;
}

}  // namespace dcoll::plan
