#include "plan/simulate.h"

#include <algorithm>
#include <queue>
#include <unordered_map>

#include "base/error.h"

namespace dcoll::plan {
namespace {

constexpr uint32_t kNone = ~uint32_t{0};

// The schedules of all ranks, or one that stands for all. `rank` steps through schedule(rank); peers of a stand-in are
// shifted to the rank.
class Programs {
 public:
  static Programs every_rank(const Algorithm& algorithm, uint32_t n) { return Programs(build_all(algorithm, n), n); }
  static Programs stand_in(const Algorithm& algorithm, uint32_t n, uint32_t rank) {
    std::vector<Schedule> one;
    one.push_back(algorithm.build(n, rank, 0));
    return Programs(std::move(one), n);
  }

  const Schedule& schedule(uint32_t rank) const { return shared() ? schedules_[0] : schedules_[rank]; }
  uint32_t peer(uint32_t rank, uint32_t named) const {
    return shared() ? (rank + named + n_ - schedules_[0].rank) % n_ : named;
  }

 private:
  Programs(std::vector<Schedule> schedules, uint32_t n) : schedules_(std::move(schedules)), n_(n) {}
  bool shared() const { return schedules_.size() < n_; }

  std::vector<Schedule> schedules_;
  uint32_t n_;
};

// One run of so many rounds. Ranks 0 .. group-1 are simulated; rank r of the cluster acts as rank r % group.
class Machine {
 public:
  Machine(const Cluster& cluster, const Programs& programs, uint32_t group, double slice_bytes, uint32_t rounds,
          uint32_t lanes, double flows_per_card)
      : cluster_(cluster),
        programs_(programs),
        n_(cluster.num_ranks()),
        group_(group),
        bytes_(slice_bytes),
        rounds_(rounds),
        flows_(flows_per_card),
        cpu_free_(group, 0.0),
        leaves_((group / cluster.ranks_per_node + 1) * cluster.rails),
        enters_(leaves_.size()),
        racks_up_(group / ranks_per_rack() + 1),
        racks_down_(racks_up_.size()) {
    for (uint32_t rank = 0; rank < group_; ++rank) add_rank(rank, lanes);
  }

  double run() {
    for (uint32_t lane = 0; lane < lanes_.size(); ++lane) schedule_next(lane);
    while (!ready_.empty()) {
      const auto [at, lane] = ready_.top();
      ready_.pop();
      execute(lane, at);
      ++events_;
      schedule_next(lane);
    }
    for (const Lane& lane : lanes_) {
      if (lane.round < lane.rounds) {
        throw ArgumentError("cannot predict a schedule that deadlocks; verify() names the steps");
      }
    }
    return *std::max_element(cpu_free_.begin(), cpu_free_.end());
  }
  uint64_t events() const { return events_; }

  // Chunks per round that pass the busiest card, out or in.
  double busiest_card_chunks() const {
    std::vector<double> out(leaves_.size(), 0.0), into(leaves_.size(), 0.0);
    for (uint32_t rank = 0; rank < group_; ++rank) {
      for (const Channel& channel : programs_.schedule(rank).channels) {
        for (const Step& step : channel.steps) {
          if (sends(step.op) && node(programs_.peer(rank, destination(step))) != node(rank)) {
            out[card(rank)] += step.count;
          }
          if (receives(step.op) && node(programs_.peer(rank, step.peer)) != node(rank)) into[card(rank)] += step.count;
        }
      }
    }
    return std::max(*std::max_element(out.begin(), out.end()), *std::max_element(into.begin(), into.end()));
  }

 private:
  struct Lane {
    uint32_t rank, channel;
    uint32_t number;  // which of the rounds under way on its channel
    uint32_t rounds;
    const Channel* program;
    uint32_t step = 0, round = 0;
    double time = 0.0;
  };
  struct Fifo {
    uint32_t parked = kNone;
    size_t head = 0;  // arrivals before it are taken
    std::vector<double> arrivals;

    bool empty() const { return head == arrivals.size(); }
    void pop() {
      if (++head < arrivals.size()) return;
      arrivals.clear();
      head = 0;
    }
  };
  using Entry = std::pair<double, uint32_t>;

  uint32_t ranks_per_rack() const {
    return (cluster_.nodes_per_rack == 0 ? cluster_.nodes : cluster_.nodes_per_rack) * cluster_.ranks_per_node;
  }
  uint32_t node(uint32_t rank) const { return rank / cluster_.ranks_per_node; }

  void add_rank(uint32_t rank, uint32_t lanes) {
    const Schedule& schedule = programs_.schedule(rank);
    std::vector<uint32_t> senders;
    for (uint32_t c = 0; c < schedule.channels.size(); ++c) {
      const Channel& channel = schedule.channels[c];
      if (channel.steps.empty()) continue;
      for (uint32_t number = 0; number < std::min(lanes, rounds_); ++number) {
        lanes_.push_back({rank, c, number, (rounds_ - number + lanes - 1) / lanes, &channel});
      }
      for (const Step& step : channel.steps) {
        if (receives(step.op)) senders.push_back(step.peer);
      }
    }
    std::sort(senders.begin(), senders.end());
    const auto distinct = std::unique(senders.begin(), senders.end()) - senders.begin();
    fan_in_.push_back(distinct == 0 ? 0.0 : static_cast<double>(distinct - 1));
  }

  // From rank `from` to rank `to` of the cluster. All groups act alike: a FIFO is known by its reader in the group and
  // by the distance it comes from.
  Fifo& fifo(uint32_t from, uint32_t to, uint32_t channel, uint32_t number) {
    const uint64_t distance = (to + n_ - from) % n_;
    const uint64_t lane = number * kMaxScheduleChannels + channel;
    return fifos_[(lane * n_ + distance) * group_ + to % group_];
  }

  void schedule_next(uint32_t index) {
    Lane& lane = lanes_[index];
    if (lane.round == lane.rounds) return;
    const Step& step = lane.program->steps[lane.step];
    double ready = lane.time;
    if (receives(step.op)) {
      Fifo& in = fifo(programs_.peer(lane.rank, step.peer), lane.rank, lane.channel, lane.number);
      if (in.empty()) {
        in.parked = index;
        return;
      }
      ready = std::max(ready, in.arrivals[in.head]);
    }
    ready_.push({ready, index});
  }

  void execute(uint32_t index, double ready) {
    Lane& lane = lanes_[index];
    const Step& step = lane.program->steps[lane.step];
    const double bytes = bytes_ * step.count;
    double& cpu = cpu_free_[lane.rank];
    cpu = std::max(cpu, ready);
    if (receives(step.op)) {
      const uint32_t from = programs_.peer(lane.rank, step.peer);
      fifo(from, lane.rank, lane.channel, lane.number).pop();
      cpu += link(from, lane.rank).overhead_us;
      if (node(from) != node(lane.rank)) cpu += bytes * cluster_.decode_us_per_byte;
    }
    if (reduces(step.op) || step.dst != BufferId::kNone) cpu += bytes * cluster_.constants.gamma_us_per_byte;
    if (sends(step.op)) {
      post(lane, programs_.peer(lane.rank, destination(step)), bytes, cpu);
    }
    lane.time = cpu;
    if (++lane.step == lane.program->steps.size()) {
      lane.step = 0;
      ++lane.round;
    }
  }

  const LinkModel& link(uint32_t a, uint32_t b) const {
    return node(a) == node(b) ? cluster_.constants.memory : cluster_.constants.network;
  }

  void post(const Lane& lane, uint32_t to, double bytes, double& cpu) {
    const uint32_t from = lane.rank;
    const LinkModel& over = link(from, to);
    const double crowd = 1 + over.fan_in * fan_in_[to % group_];
    double sent = 0.0;
    if (node(from) == node(to)) {
      cpu += over.overhead_us;
      sent = cpu += bytes * over.beta_us_per_byte * crowd;
    } else {
      cpu += over.overhead_us + bytes * cluster_.encode_us_per_byte;
      sent = cross(from, to, over, bytes / cluster_.compression, crowd, cpu);
    }
    Fifo& out = fifo(from, to, send_channel(*lane.program, lane.channel), lane.number);
    out.arrivals.push_back(sent + over.alpha_us);
    if (out.parked != kNone) {
      const uint32_t reader = out.parked;
      out.parked = kNone;
      schedule_next(reader);
    }
  }

  // From node to node: out of a card, up and down where racks differ, into a card.
  double cross(uint32_t from, uint32_t to, const LinkModel& over, double bytes, double crowd, double now) {
    const double transfer = bytes * over.beta_us_per_byte * flows_;
    const double reserve = over.burst_bytes * over.beta_us_per_byte;
    now = leaves_[card(from)].pass(now, transfer, reserve);
    const uint32_t rack_from = from / ranks_per_rack(), rack_to = to / ranks_per_rack();
    if (rack_from != rack_to) {
      const double cards = static_cast<double>(cluster_.nodes_per_rack) * cluster_.rails;
      const double uplink = transfer * cluster_.oversubscription / cards;
      now = racks_up_[from % group_ / ranks_per_rack()].pass(now, uplink, reserve);
      now = racks_down_[to % group_ / ranks_per_rack()].pass(now, uplink, reserve) + cluster_.spine_alpha_us;
    }
    now = enters_[card(to)].pass(now, transfer * crowd, reserve);
    return now + bytes * over.transit() * flows_;
  }
  uint32_t card(uint32_t rank) const {
    const uint32_t inside = rank % group_;
    return node(inside) * cluster_.rails + inside % cluster_.ranks_per_node % cluster_.rails;
  }

  const Cluster& cluster_;
  const Programs& programs_;
  uint32_t n_, group_;
  double bytes_;
  uint32_t rounds_;
  double flows_;
  uint64_t events_ = 0;
  std::vector<Lane> lanes_;
  std::unordered_map<uint64_t, Fifo> fifos_;
  std::vector<double> fan_in_, cpu_free_;
  std::vector<Direction> leaves_, enters_, racks_up_, racks_down_;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> ready_;
};

size_t count_steps(const Schedule& schedule) {
  size_t steps = 0;
  for (const Channel& channel : schedule.channels) steps += channel.steps.size();
  return steps;
}

void check(const Cluster& c) {
  auto require = [](bool condition, const std::string& what) {
    if (!condition) throw ArgumentError(what);
  };
  require(c.nodes > 0 && c.ranks_per_node > 0 && uint64_t{c.nodes} * c.ranks_per_node <= 65535,
          "a cluster of " + std::to_string(c.nodes) + " nodes with " + std::to_string(c.ranks_per_node) +
              " ranks: allowed are 1 to 65535 ranks in all");
  require(c.rails > 0, "rails is 0: a node has at least one network card");
  require(c.nodes_per_rack == 0 || c.nodes % c.nodes_per_rack == 0,
          std::to_string(c.nodes) + " nodes do not fill racks of " + std::to_string(c.nodes_per_rack) +
              ": give a divisor of the number of nodes, or 0 for no racks");
  require(c.oversubscription >= 1, "oversubscription is " + std::to_string(c.oversubscription) + ": at least 1");
  require(c.compression >= 1, "compression is " + std::to_string(c.compression) + ": a ratio of at least 1");
}

Simulated simulate_flows(const Algorithm& algorithm, const Cluster& cluster, double bytes, double flows_per_card,
                         const SimulateOptions& options) {
  check(cluster);
  if (options.slice_bytes == 0) throw ArgumentError("slice_bytes is 0; messages must be at least one byte long");
  if (options.lanes == 0) throw ArgumentError("lanes is 0; a channel has at least one");
  const uint32_t n = cluster.num_ranks();
  const bool alike = n > 2 && algorithm.stand_in.has_value();
  const uint64_t all_steps =
      uint64_t{n} * std::max(count_steps(algorithm.build(n, 0, 0)), count_steps(algorithm.build(n, n / 2, 0)));
  const bool group = options.method == Method::kOneGroup ||
                     (options.method == Method::kAuto && alike && all_steps > options.few_steps);
  if (group && !alike) {
    throw ArgumentError("the ranks of " + std::string(algorithm.name) +
                        " do not act alike: it is simulated rank by rank");
  }
  if (!group && all_steps > options.most_steps) {
    throw ArgumentError(std::string(algorithm.name) + " on " + std::to_string(n) + " ranks has about " +
                        std::to_string(all_steps) + " steps; at most " + std::to_string(options.most_steps) +
                        " are simulated: use fewer ranks, or another algorithm");
  }
  const uint32_t per_group = cluster.ranks_per_node * std::max(cluster.nodes_per_rack, 1u);
  const Programs programs =
      group ? Programs::stand_in(algorithm, n, algorithm.stand_in.value_or(0)) : Programs::every_rank(algorithm, n);
  Simulated result{.us = 0, .method = group ? Method::kOneGroup : Method::kEveryRank, .events = 0};
  if (bytes <= 0) return result;
  const Schedule& any = programs.schedule(0);
  const double chunk_bytes = bytes / std::max(any.input_chunks, any.output_chunks);
  const uint64_t slice = std::max<uint64_t>(1, options.slice_bytes / any.longest_range);
  const uint64_t rounds = std::max<uint64_t>(1, (static_cast<uint64_t>(chunk_bytes) + slice - 1) / slice);
  const double message_bytes = chunk_bytes / static_cast<double>(rounds);
  const uint32_t simulated = group ? per_group : n;
  double chunks = 0;
  result.us = extrapolate(rounds, options.lanes, [&](uint32_t some) {
    Machine machine(cluster, programs, simulated, message_bytes, some, options.lanes, flows_per_card);
    chunks = machine.busiest_card_chunks();
    const double us = machine.run();
    result.events += machine.events();
    return us;
  });
  // One call of many in a row: links cannot live on their reserves (cost.h).
  const double wire_bytes = chunks * chunk_bytes / cluster.compression * flows_per_card;
  result.us = std::max(result.us, wire_bytes * cluster.constants.network.beta_us_per_byte);
  return result;
}

}  // namespace

Topology Cluster::topology() const {
  Topology topology = Topology::blocks(num_ranks(), ranks_per_node);
  static_cast<Constants&>(topology) = constants;
  return topology;
}

Simulated simulate(const Algorithm& algorithm, const Cluster& cluster, uint64_t bytes, const SimulateOptions& options) {
  return simulate_flows(algorithm, cluster, static_cast<double>(bytes), 1, options);
}

Simulated simulate_hierarchical(const Algorithm& inner, const Cluster& cluster, uint64_t bytes,
                                const SimulateOptions& options) {
  check(cluster);
  Cluster node = cluster, between = cluster;
  node.nodes = 1;
  node.nodes_per_rack = 0;
  between.ranks_per_node = between.rails = 1;
  const double flows = (cluster.ranks_per_node + cluster.rails - 1) / cluster.rails;
  const double all = static_cast<double>(bytes);
  const SimulateOptions whole{.slice_bytes = options.slice_bytes, .lanes = options.lanes};
  const Simulated phases[] = {
      simulate_flows(algorithm_of(Collective::kReduceScatter, Family::kDirect), node, all, 1, whole),
      simulate_flows(inner, between, all / cluster.ranks_per_node, flows, options),
      simulate_flows(algorithm_of(Collective::kAllGather, Family::kDirect), node, all, 1, whole),
  };
  Simulated sum{.us = 0, .method = phases[1].method, .events = 0};
  for (const Simulated& phase : phases) {
    // Where there is one rank per node, or one node, the phases have nothing to do.
    const bool inside = &phase != &phases[1];
    if (inside ? cluster.ranks_per_node == 1 : cluster.nodes == 1) continue;
    sum.us += phase.us;
    sum.events += phase.events;
  }
  return sum;
}

}  // namespace dcoll::plan
