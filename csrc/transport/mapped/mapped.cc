#include "transport/mapped/mapped.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/ranks_text.h"
#include "transport/os/futex.h"

namespace dcoll {
namespace {

constexpr uint64_t make_stamp(uint64_t sequence, size_t bytes) { return sequence << 32 | bytes; }
constexpr uint32_t stamp_sequence(uint64_t stamp) { return static_cast<uint32_t>(stamp >> 32); }
constexpr size_t stamp_bytes(uint64_t stamp) { return static_cast<uint32_t>(stamp); }

std::byte* payload(SlotHeader& slot, size_t bytes) {
  return bytes <= SlotHeader::kInlineBytes ? slot.inline_data : reinterpret_cast<std::byte*>(&slot + 1);
}

RingHead& ring_head(std::byte* ring) { return *reinterpret_cast<RingHead*>(ring); }

ArrivalGroup* group_of(const MappedWorld& world) {
  for (const std::vector<int>& members : world.groups) {
    if (std::find(members.begin(), members.end(), world.rank) != members.end()) {
      return &world.header(members.front()).group;
    }
  }
  return nullptr;
}

}  // namespace

std::vector<std::vector<int>> arrival_groups(const std::vector<int>& numa_nodes, int flat_ranks) {
  std::vector<std::vector<int>> groups;
  const int n = static_cast<int>(numa_nodes.size());
  if (n <= flat_ranks) return groups;
  size_t most = 2;
  while (most * most < numa_nodes.size()) ++most;
  std::vector<int> order = ranks_below(numa_nodes.size());
  auto node = [&](int rank) { return numa_nodes[static_cast<size_t>(rank)]; };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return node(a) < node(b); });
  for (const int rank : order) {
    if (groups.empty() || groups.back().size() == most || node(groups.back().front()) != node(rank)) {
      groups.emplace_back();
    }
    groups.back().push_back(rank);
  }
  return groups;
}

std::string MappedWorld::rank_name(int of) const {
  return job_ranks.empty() ? "local rank " + std::to_string(of)
                           : "rank " + std::to_string(job_ranks[static_cast<size_t>(of)]);
}

MappedTransport::MappedTransport(const char* name, std::shared_ptr<const MappedWorld> world)
    : name_(name), world_(std::move(world)), group_(group_of(*world_)) {
  const RegionLayout& layout = world_->layout;
  const size_t count = static_cast<size_t>(layout.size) * kAllChannels;
  outgoing_.reserve(count);
  incoming_.reserve(count);
  std::byte* own = world_->regions[static_cast<size_t>(rank())]->base();
  for (int peer = 0; peer < size(); ++peer) {
    std::byte* theirs = world_->regions[static_cast<size_t>(peer)]->base();
    for (int channel = 0; channel < kAllChannels; ++channel) {
      outgoing_.push_back({.ring = theirs + layout.ring_offset(rank(), channel)});
      incoming_.push_back({.ring = own + layout.ring_offset(peer, channel)});
    }
  }
  posted_recvs_.resize(count * static_cast<size_t>(layout.slots));
}

MappedTransport::~MappedTransport() {
  // A forked child (a data loader's worker, say) inherits this object. Its end is not the end of the rank.
  if (fork_.in_child()) return;
  world_->regions[static_cast<size_t>(rank())]->header().state.store(RegionHeader::kClosed, std::memory_order_release);
  for (const auto& region : world_->regions) {
    region->ring();
    region->header().users.fetch_sub(1, std::memory_order_release);
  }
}

size_t MappedTransport::index(int peer, int channel) const {
  if (peer < 0 || peer >= size() || channel < 0 || channel >= kAllChannels) {
    throw ArgumentError("no such FIFO: peer " + std::to_string(peer) + " (of " + std::to_string(size()) +
                        "), channel " + std::to_string(channel) + " (of " + std::to_string(kAllChannels) + ")");
  }
  return static_cast<size_t>(peer) * kAllChannels + static_cast<size_t>(channel);
}

void MappedTransport::check_length(size_t bytes) const {
  if (bytes < 1 || bytes > max_message_bytes()) {
    throw ArgumentError("a message of " + std::to_string(bytes) + " bytes cannot be sent; allowed are 1 to " +
                        std::to_string(max_message_bytes()) + " (DCOLL_SLICE_KB)");
  }
}

SlotHeader& MappedTransport::slot_at(std::byte* ring, size_t slot) const {
  return *reinterpret_cast<SlotHeader*>(ring + sizeof(RingHead) + slot * world_->layout.slot_stride);
}

std::string MappedTransport::peer_name(int peer) const {
  const int pid = world_->watch ? world_->watch->pid(peer)
                                : static_cast<int>(world_->regions[static_cast<size_t>(peer)]->header().pid);
  return world_->rank_name(peer) + " (pid " + std::to_string(pid) + ")";
}

// ---- Sending ----

bool MappedTransport::has_room(int peer, int channel, Outgoing& out) {
  const auto slots = static_cast<uint64_t>(world_->layout.slots);
  if (out.posted - out.known_popped < slots) return true;
  const uint64_t popped = ring_head(out.ring).popped.load(std::memory_order_acquire);
  if (popped < out.known_popped || popped > out.posted) {
    throw TransportError(peer_name(peer) + " claims to have received " + std::to_string(popped) +
                         " messages on channel " + std::to_string(channel) + ", of " + std::to_string(out.posted) +
                         " sent: its shared memory is corrupted");
  }
  out.known_popped = popped;
  return out.posted - popped < slots;
}

void MappedTransport::publish(int peer, Outgoing& out, size_t bytes) {
  slot_at(out.ring, out.slot).stamp.store(make_stamp(out.posted + 1, bytes), std::memory_order_release);
  ++out.posted;
  if (++out.slot == static_cast<size_t>(world_->layout.slots)) out.slot = 0;
  world_->regions[static_cast<size_t>(peer)]->ring();
}

bool MappedTransport::post_send(int peer, int channel, const void* data, size_t bytes) {
  Outgoing& out = outgoing_[index(peer, channel)];
  check_length(bytes);
  if (out.acquired != 0) throw TransportError("post_send between acquire_send and commit_send on the same FIFO");
  if (!has_room(peer, channel, out)) return false;
  std::memcpy(payload(slot_at(out.ring, out.slot), bytes), data, bytes);
  publish(peer, out, bytes);
  return true;
}

std::byte* MappedTransport::acquire_send(int peer, int channel, size_t bytes) {
  Outgoing& out = outgoing_[index(peer, channel)];
  check_length(bytes);
  if (out.acquired != 0 && out.acquired != bytes) {
    throw TransportError("acquire_send of " + std::to_string(bytes) + " bytes before commit_send of the " +
                         std::to_string(out.acquired) + " bytes acquired first");
  }
  if (out.acquired == 0 && !has_room(peer, channel, out)) return nullptr;
  out.acquired = bytes;
  return payload(slot_at(out.ring, out.slot), bytes);
}

void MappedTransport::commit_send(int peer, int channel) {
  Outgoing& out = outgoing_[index(peer, channel)];
  if (out.acquired == 0) throw TransportError("commit_send without acquire_send");
  publish(peer, out, std::exchange(out.acquired, 0));
}

uint64_t MappedTransport::posted(int peer, int channel) const { return outgoing_[index(peer, channel)].posted; }

// ---- Receiving ----

MappedTransport::PostedRecv& MappedTransport::posted_recv(size_t index, uint64_t message) {
  const auto slots = static_cast<size_t>(world_->layout.slots);
  return posted_recvs_[index * slots + message % slots];
}

bool MappedTransport::post_recv(int peer, int channel, void* dst, size_t bytes) {
  return expect(peer, channel, {dst, bytes, /*exact=*/true});
}

bool MappedTransport::post_recv_up_to(int peer, int channel, size_t bytes) {
  return expect(peer, channel, {nullptr, bytes, /*exact=*/false});
}

bool MappedTransport::expect(int peer, int channel, const PostedRecv& wanted) {
  const size_t i = index(peer, channel);
  check_length(wanted.bytes);
  Incoming& in = incoming_[i];
  if (in.expected - in.popped >= static_cast<uint64_t>(world_->layout.slots)) return false;
  posted_recv(i, in.expected) = wanted;
  ++in.expected;
  return true;
}

const std::byte* MappedTransport::front(int peer, int channel) {
  const size_t i = index(peer, channel);
  Incoming& in = incoming_[i];
  if (in.front != nullptr) return in.front;
  if (in.expected == in.popped) return nullptr;
  SlotHeader& slot = slot_at(in.ring, in.slot);
  const uint64_t stamp = slot.stamp.load(std::memory_order_acquire);
  if (stamp_sequence(stamp) != static_cast<uint32_t>(in.popped + 1)) return nullptr;
  const PostedRecv& wanted = posted_recv(i, in.popped);
  // Also the bounds check: post_recv admitted no length that does not fit a slot.
  const size_t bytes = stamp_bytes(stamp);
  if (wanted.exact ? bytes != wanted.bytes : bytes > wanted.bytes) {
    throw TransportError(peer_name(peer) + " sent " + std::to_string(bytes) + " bytes on channel " +
                         std::to_string(channel) + " where local rank " + std::to_string(rank()) + " expected " +
                         std::to_string(wanted.bytes) + ": the ranks disagree about the operation");
  }
  const std::byte* data = payload(slot, bytes);
  if (wanted.dst != nullptr) {
    std::memcpy(wanted.dst, data, bytes);
    data = static_cast<const std::byte*>(wanted.dst);
  }
  in.front = data;
  in.front_bytes = bytes;
  return data;
}

void MappedTransport::pop(int peer, int channel) {
  Incoming& in = incoming_[index(peer, channel)];
  if (in.front == nullptr) throw TransportError("pop before front returned the message");
  in.front = nullptr;
  ++in.popped;
  if (++in.slot == static_cast<size_t>(world_->layout.slots)) in.slot = 0;
  ring_head(in.ring).popped.store(in.popped, std::memory_order_release);
  world_->regions[static_cast<size_t>(peer)]->ring();
}

// ---- Sleeping ----

uint32_t MappedTransport::signals() const {
  const auto released = group_ != nullptr ? group_->released.load(std::memory_order_seq_cst) : 0;
  return door().doorbell.load(std::memory_order_seq_cst) + static_cast<uint32_t>(released);
}

uint32_t MappedTransport::prepare_wait() { return signals(); }

void MappedTransport::wait(uint32_t ticket, std::chrono::microseconds limit) {
  add_sleeper(1);
  // The doorbell first: one that rings between the two looks makes the futex return at once.
  const uint32_t doorbell = door().doorbell.load(std::memory_order_seq_cst);
  if (signals() == ticket) futex_wait(door().doorbell, doorbell, limit);
  remove_sleeper(1);
}

void MappedTransport::add_sleeper(uint32_t how) {
  door().sleepers.fetch_add(how, std::memory_order_seq_cst);
  if (group_ != nullptr) group_->sleepers.fetch_add(1, std::memory_order_seq_cst);
}

void MappedTransport::remove_sleeper(uint32_t how) {
  if (group_ != nullptr) group_->sleepers.fetch_sub(1, std::memory_order_relaxed);
  door().sleepers.fetch_sub(how, std::memory_order_relaxed);
}

int MappedTransport::OwnBell::descriptor() const {
  return owner_.world_->regions[static_cast<size_t>(owner_.rank())]->bell().get();
}

bool MappedTransport::OwnBell::begin_wait(uint32_t ticket) {
  owner_.add_sleeper(RegionHeader::kOnBell);
  if (owner_.signals() == ticket) return true;
  end_wait();
  return false;
}

void MappedTransport::OwnBell::end_wait() { owner_.remove_sleeper(RegionHeader::kOnBell); }

void MappedTransport::doze(uint32_t ticket, std::chrono::microseconds limit) {
  const uint32_t doorbell = door().doorbell.load(std::memory_order_seq_cst);
  if (signals() == ticket) futex_doze(door().doorbell, doorbell, limit);
}

bool MappedTransport::take_nudge() {
  uint32_t nudged = RegionHeader::kNudged;
  return world_->header(rank()).alert.compare_exchange_strong(nudged, RegionHeader::kAlert, std::memory_order_seq_cst);
}

bool MappedTransport::alert(bool on) {
  world_->header(rank()).alert.store(on ? RegionHeader::kAlert : RegionHeader::kQuiet, std::memory_order_seq_cst);
  return true;
}

void MappedTransport::nudge() {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) world_->regions[static_cast<size_t>(peer)]->nudge();
  }
}

void MappedTransport::wake() { world_->regions[static_cast<size_t>(rank())]->wake(); }

// ---- Failures ----

void MappedTransport::check_peers() {
  // A death is the cause and closings are its consequence, so deaths are looked for first.
  std::vector<int> ended;
  if (world_->watch) ended = world_->watch->ended();
  int closed = -1;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    const auto& state = world_->regions[static_cast<size_t>(peer)]->header().state;
    if (state.load(std::memory_order_acquire) == RegionHeader::kClosed) {
      if (closed < 0) closed = peer;
    } else if (std::find(ended.begin(), ended.end(), peer) != ended.end()) {
      throw PeerError(peer_name(peer) + " died: its process ended without closing its communicator");
    }
  }
  const bool hears_why = world_->header(rank()).failure.state.load() == FailureNotice::kWriting;
  if (closed >= 0 && !hears_why) throw PeerError(peer_name(closed) + " closed its communicator");
}

void MappedTransport::post_failure(const std::string& text) {
  if (std::exchange(failure_posted_, true)) return;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    const Region& region = *world_->regions[static_cast<size_t>(peer)];
    FailureNotice& notice = region.header().failure;
    uint32_t none = FailureNotice::kNone;
    if (!notice.state.compare_exchange_strong(none, FailureNotice::kWriting, std::memory_order_acq_rel)) continue;
    notice.length = static_cast<uint32_t>(whole_characters(text, FailureNotice::kTextBytes));
    std::memcpy(notice.text, text.data(), notice.length);
    notice.state.store(FailureNotice::kReady, std::memory_order_release);
    region.ring();
    region.nudge();
  }
}

std::string MappedTransport::poll_failure() {
  const FailureNotice& notice = world_->regions[static_cast<size_t>(rank())]->header().failure;
  if (notice.state.load(std::memory_order_acquire) != FailureNotice::kReady) return {};
  std::string text(notice.text, std::min<size_t>(notice.length, FailureNotice::kTextBytes));
  post_failure(text);  // a peer may see this rank's end before it has the notice from where this one is from
  return text;
}

const std::atomic<uint32_t>* MappedTransport::failure_flag() const {
  static_assert(FailureNotice::kNone == 0);
  return &world_->header(rank()).failure.state;
}

// ---- Notes ----

void MappedTransport::post_note(int peer, const std::string& text) {
  const size_t bytes = whole_characters(text, std::min(kMostNoteBytes, max_message_bytes()));
  if (bytes == 0 || !post_send(peer, kNotesChannel, text.data(), bytes)) return;  // no room: it does not listen
  std::atomic<uint32_t>& word = world_->header(peer).notes;
  word.fetch_add(1, std::memory_order_release);
  futex_wake_all(word);
}

std::vector<Note> MappedTransport::take_notes() {
  std::vector<Note> notes;
  expects_note_.resize(static_cast<size_t>(size()));
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    for (;;) {
      if (!expects_note_[static_cast<size_t>(peer)]) {
        post_recv_up_to(peer, kNotesChannel, std::min(kMostNoteBytes, max_message_bytes()));
        expects_note_[static_cast<size_t>(peer)] = true;
      }
      const std::byte* data = front(peer, kNotesChannel);
      if (data == nullptr) break;
      notes.push_back({peer, std::string(reinterpret_cast<const char*>(data), front_bytes(peer, kNotesChannel))});
      pop(peer, kNotesChannel);
      expects_note_[static_cast<size_t>(peer)] = false;
    }
  }
  return notes;
}

uint32_t MappedTransport::prepare_listen() { return world_->header(rank()).notes.load(std::memory_order_acquire); }

void MappedTransport::listen(uint32_t ticket, std::chrono::microseconds limit) {
  futex_wait(world_->header(rank()).notes, ticket, limit);
}

void MappedTransport::wake_listener() {
  std::atomic<uint32_t>& word = world_->header(rank()).notes;
  word.fetch_add(1, std::memory_order_release);
  futex_wake_all(word);
}

std::shared_ptr<const MappedWorld> complete_world(MappedWorld world) {
  std::vector<int> numa_nodes;
  for (const auto& region : world.regions) numa_nodes.push_back(region->header().numa_node);
  world.groups = arrival_groups(numa_nodes, world.layout.flat_ranks);
  return std::make_shared<const MappedWorld>(std::move(world));
}

Endpoint make_mapped_endpoint(const char* name, MappedWorld world) {
  auto shared = complete_world(std::move(world));
  Endpoint endpoint;
  endpoint.transport = std::make_unique<MappedTransport>(name, shared);
  endpoint.window = std::make_shared<MappedWindow>(shared);
  return endpoint;
}

}  // namespace dcoll
