#include "engine/communicator/named_lane.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "engine/collective/join.h"
#include "transport/group_transport.h"

namespace dcoll {
namespace {

// The window once more, with a board of its own: operands mapped for one sequence are mapped for the other. The second
// board is looked at record by record also where the first has an arrival tree, which would need a second set of groups
// and of words to sleep on.
class LaneWindow final : public Window {
 public:
  explicit LaneWindow(std::shared_ptr<Window> main) : main_(std::move(main)) {}

  int local_rank() const override { return main_->local_rank(); }
  int local_size() const override { return main_->local_size(); }
  std::byte* base(int local_rank) const override { return main_->base(local_rank); }
  size_t arena_bytes() const override { return main_->arena_bytes(); }
  std::string rank_name(int local_rank) const override { return main_->rank_name(local_rank); }
  BoardEntry& board(int local_rank) override { return main_->lane_board(local_rank); }
  BoardEntry& lane_board(int local_rank) override { return main_->lane_board(local_rank); }
  void notify_all() override { main_->notify_all(); }
  const std::vector<std::vector<int>>& groups() const override { return no_groups_; }
  ArrivalGroup& group(int group) override { return main_->group(group); }
  void release_groups(uint64_t ticket) override { main_->release_groups(ticket); }
  std::byte* alloc(size_t bytes) override { return main_->alloc(bytes); }
  void free(std::byte* block) override { main_->free(block); }

 private:
  const std::shared_ptr<Window> main_;
  const std::vector<std::vector<int>> no_groups_;
};

}  // namespace

// The names themselves travel on a channel of the transport, not of the lane.
NamedLane::NamedLane(const Fabric& main)
    : transport_(std::make_unique<GroupTransport>(*main.transport, kLaneChannels, kLaneChannels + kControlChannel)),
      peers_(main.size) {
  fabric_.transport = transport_.get();
  static_cast<FabricSettings&>(fabric_) = main;
  if (main.nccl != nullptr) fabric_.nccl = std::make_unique<NcclState>(main.nccl->demanded, main.nccl->patience_s);
  fabric_.links = main.links.of_a_sequence();
  fabric_.topology = main.topology;
  static_cast<plan::Constants&>(fabric_.topology) = {};
  fabric_.topology.shared_cores = main.topology.shared_cores;
  names_ = main.transport;
  if (main.window != nullptr) fabric_.window = std::make_shared<LaneWindow>(main.window);
  if (main.board != nullptr) fabric_.connect_slots();
  if (const Hierarchy* levels = main.hierarchy.get(); levels != nullptr) {
    fabric_.hierarchy = std::make_unique<Hierarchy>(*transport_, fabric_.window, levels->map(), fabric_.topology,
                                                    fabric_.slice_bytes, levels->little_memory());
  }
}

uint64_t NamedLane::id_of(const Request& request) {
  return Fingerprint().add(static_cast<uint64_t>(request.kind)).add(request.name).value();
}

void NamedLane::submit(std::shared_ptr<Operation> operation) {
  const uint64_t id = id_of(operation->request);
  waiting_.emplace(id, std::move(operation));
  if (decides()) {
    ready(0, id);
    const std::vector<bool>& heard = ready_[id];
    for (int peer = 1; peer < fabric_.size; ++peer) peers_[peer].lacks += !heard[peer];
  } else {
    peers_[0].outbox.push_back(id);
  }
}

void NamedLane::join() {
  changed_.reserve(changed_.size() + ready_.size());
  ++joins_;
  if (decides()) {
    for (const auto& [id, ranks] : ready_) changed_.push_back(id);
  } else {
    peers_[0].joins_told = false;
  }
}

void NamedLane::join_ended() { ++joins_ended_; }

bool NamedLane::idle() const {
  const auto silent = [](const Peer& peer) { return peer.outbox.empty() && peer.joins_told; };
  return waiting_.empty() && std::all_of(peers_.begin(), peers_.end(), silent);
}

bool NamedLane::asleep() const {
  const auto expecting = [](const Peer& peer) { return peer.expecting; };
  return idle() && !is_joined() && std::none_of(peers_.begin(), peers_.end(), expecting);
}

std::unordered_map<uint64_t, std::shared_ptr<Operation>> NamedLane::abandon() {
  ready_.clear();
  changed_.clear();
  for (Peer& peer : peers_) peer.forget();
  return std::exchange(waiting_, {});
}

// Whether a message of this peer is due. A joined rank must hear of whatever the others do.
bool NamedLane::awaits(int peer) const {
  if (is_joined()) return true;
  return decides() ? peers_[peer].lacks > 0 && !joined(peer) : !waiting_.empty();
}

void NamedLane::exchange(Queue& running, bool& moved) {
  if (fabric_.size == 1) return order_what_is_ready(running);
  if (!decides()) {
    tell(0, moved);
    hear(0, running, moved);
    return;
  }
  for (int peer = 1; peer < fabric_.size; ++peer) hear(peer, running, moved);
  order_what_is_ready(running);
  for (int peer = 1; peer < fabric_.size; ++peer) tell(peer, moved);
}

void NamedLane::tell(int peer, bool& moved) {
  Peer& to = peers_[peer];
  while (!to.outbox.empty() || !to.joins_told) {
    std::byte* room = names_->acquire_send(peer, kNamesChannel, sizeof(Message));
    if (room == nullptr) return;
    Message message{.joined = static_cast<uint16_t>(is_joined()), .joins = joins_};
    while (message.count < Message::kNames && !to.outbox.empty()) {
      message.ids[message.count++] = to.outbox.front();
      to.outbox.pop_front();
    }
    std::memcpy(room, &message, sizeof message);
    names_->commit_send(peer, kNamesChannel);
    to.joins_told = moved = true;
  }
}

void NamedLane::hear(int peer, Queue& running, bool& moved) {
  Peer& from = peers_[peer];
  while (from.expecting || awaits(peer)) {
    if (!from.expecting) from.expecting = names_->post_recv(peer, kNamesChannel, nullptr, sizeof(Message));
    const std::byte* data = from.expecting ? names_->front(peer, kNamesChannel) : nullptr;
    if (data == nullptr) return;
    Message message;
    std::memcpy(&message, data, sizeof message);
    names_->pop(peer, kNamesChannel);
    from.expecting = false;
    moved = true;
    take(peer, message, running);
  }
}

void NamedLane::take(int peer, const Message& message, Queue& running) {
  const uint32_t count = std::min(message.count, Message::kNames);
  peers_[peer].joins_ended = message.joins - message.joined;
  for (uint32_t i = 0; i < count; ++i) {
    if (decides()) {
      ready(peer, message.ids[i]);
      if (waiting_.contains(message.ids[i])) --peers_[peer].lacks;
    } else {
      run(message.ids[i], running);
    }
  }
  if (!decides() || message.joins == peers_[peer].joins) return;
  peers_[peer].joins = message.joins;
  for (const auto& [id, ranks] : ready_) changed_.push_back(id);
}

void NamedLane::ready(int rank, uint64_t id) {
  std::vector<bool>& ranks = ready_[id];
  ranks.resize(fabric_.size);
  ranks[rank] = true;
  changed_.push_back(id);
}

bool NamedLane::all_ready(const std::vector<bool>& ready_ranks) const {
  for (int rank = 0; rank < fabric_.size; ++rank) {
    if (!ready_ranks[rank] && !joined(rank)) return false;
  }
  return true;
}

void NamedLane::order_what_is_ready(Queue& running) {
  for (const Peer& peer : peers_) {
    if (peer.joins_ended > joins_ended_) return;
  }
  for (const uint64_t id : std::exchange(changed_, {})) {
    const auto found = ready_.find(id);
    if (found == ready_.end() || !all_ready(found->second)) continue;
    for (int peer = 1; peer < fabric_.size; ++peer) {
      peers_[peer].outbox.push_back(id);
      if (!found->second[peer] && waiting_.contains(id)) --peers_[peer].lacks;  // it joined instead
    }
    ready_.erase(found);
    run(id, running);
  }
}

void NamedLane::run(uint64_t id, Queue& running) {
  if (const auto own = waiting_.find(id); own != waiting_.end()) {
    running.push_back(own->second);
    waiting_.erase(own);
  } else if (is_joined()) {
    running.push_back(std::make_shared<Operation>(Request{.kind = Kind::kJoin, .count = kOneRound}));
  } else {
    throw TransportError("an operation by name was ordered that rank " + std::to_string(fabric_.job_rank) +
                         " did not submit. Run the same dcoll version on every rank.");
  }
}

std::vector<int> NamedLane::waits_for(uint64_t id) const {
  if (!decides()) return {0};
  std::vector<int> missing;
  const auto found = ready_.find(id);
  for (int rank = 1; rank < fabric_.size; ++rank) {
    if ((found == ready_.end() || !found->second[rank]) && !joined(rank)) missing.push_back(rank);
  }
  return missing;
}

}  // namespace dcoll
