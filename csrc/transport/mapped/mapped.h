// Transport and Window over regions (region.h) that all ranks of a node have mapped. local.cc and shm.cc differ only in
// where the mappings come from and in how the end of a peer is noticed.
//
// Messages. post_send copies into a slot of the receiver's region, so the caller's memory is free at once and
// sent() == posted(). Memory order: the sender writes the payload, then the slot's stamp (release); the receiver reads
// the stamp (acquire), then the payload; it reads or copies the payload, then advances `popped` (release); the sender
// reads `popped` (acquire), then overwrites the slot. So whatever a rank wrote before post_send/commit_send is visible
// to the receiver after front() returned that message.
//
// Sleeping. Every action towards a rank (message, freed slot, board, failure, closing) ends with ring(): increment the
// rank's doorbell, the same one for all of its regions, then look whether it has sleepers, and only then pay for the
// system call that wakes them. A sleeper registers in `sleepers`, then looks whether the doorbell still equals its
// ticket, then sleeps on it. All four accesses are seq_cst, so they have one total order (Dekker): either the sleeper
// sees the new doorbell, or the ringer sees the sleeper. In the remaining window, between the sleeper's look and its
// falling asleep, the kernel compares the doorbell again (futex). An action after the ticket was drawn therefore always
// ends the wait; one before it is visible to the checks the caller makes between prepare_wait() and wait(), for drawing
// the ticket acquires what ringing released.
//
// Where there are arrival groups (window.h) a completed post is not rung to every rank: the last arriver stores each
// group's `released` and looks whether the group has sleepers. So the ticket is the sum of the doorbell and of the own
// group's `released`, both of which only grow; a sleeper registers with its group too and then compares the sum. Store
// and look are seq_cst on both sides again: either the sleeper sees the release, or the releaser sees the sleeper and
// rings its doorbell.
//
// A sleeper that waits for messages of another transport too sleeps on its bell (bell.h) instead of the doorbell. It
// registers likewise, so the ringer sees it or it sees the doorbell; what is written to the bell after that stays
// readable, so there is no window.
//
// Dozing. A thread that dozes is no sleeper, so nothing above pays for it. Its rank is alert (RegionHeader::alert)
// while something is left to that thread, and a peer that waits in vain nudges it: alert becomes nudged, then the
// doorbell is rung, then it is woken. The dozer draws a ticket, then takes back a nudge of each of its transports with
// this doorbell (take_nudge), then sleeps unless the doorbell differs from the ticket. All are seq_cst: either it sees
// the nudge, or the new doorbell, or the kernel does.
//
// Threads. All calls of one Transport are made under its owner's lock, except wake(), prepare_wait(), wait(), doze(),
// alert(), nudge(), and those of a listener, which may run at any time on any thread: they touch nothing but the words
// slept on and the group's line.
// Window::alloc, Window::free, Window::notify_all and Window::release_groups lock for themselves or need no lock. The
// destructor must not run beside any of them.
//
// Values a peer wrote (lengths, counts, offsets) are read once and checked before they are used, here and in the engine
// (Board::place); a peer can send wrong data, but not make this process read or write outside its regions. The error
// names the peer.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/fork.h"
#include "base/thread_safety.h"
#include "transport/bell.h"
#include "transport/mapped/region.h"

namespace dcoll {

// Tells whether a peer's process has ended. Only shm has one: threads of this process cannot die alone. Transports of
// the same peers share it (subset.h), so it may be asked by several threads at once.
class PeerWatch {
 public:
  virtual ~PeerWatch() = default;
  virtual std::vector<int> ended() = 0;  // local ranks, without waiting
  virtual int pid(int peer) const = 0;   // as seen from this process
};

// What one rank holds: its own region and the mappings of its peers'.
struct MappedWorld {
  int rank;
  RegionLayout layout;
  std::vector<std::shared_ptr<Region>> regions;  // by local rank
  std::vector<int> job_ranks{};                  // by local rank: what messages call it; empty: "local rank N"
  std::vector<std::vector<int>> groups{};        // of the arrival tree; set by complete_world
  std::shared_ptr<PeerWatch> watch{};

  RegionHeader& header(int of) const { return regions[static_cast<size_t>(of)]->header(); }
  std::string rank_name(int of) const;
};

// The groups of the arrival tree over n ranks: none for up to `flat_ranks`. Groups of one NUMA node where the nodes are
// known, of about sqrt(n) ranks, so that a group's line and the root's are each touched by O(sqrt(n)) ranks.
std::vector<std::vector<int>> arrival_groups(const std::vector<int>& numa_nodes, int flat_ranks);

class MappedTransport final : public Transport {
 public:
  MappedTransport(const char* name, std::shared_ptr<const MappedWorld> world);
  ~MappedTransport() override;  // closes: the peers' check_peers() will say so

  int rank() const override { return world_->rank; }
  int size() const override { return world_->layout.size; }
  const char* name() const override { return name_; }
  size_t max_message_bytes() const override { return world_->layout.slot_bytes; }

  bool post_send(int peer, int channel, const void* data, size_t bytes) override;
  std::byte* acquire_send(int peer, int channel, size_t bytes) override;
  void commit_send(int peer, int channel) override;
  uint64_t posted(int peer, int channel) const override;
  uint64_t sent(int peer, int channel) override { return posted(peer, channel); }

  bool post_recv(int peer, int channel, void* dst, size_t bytes) override;
  bool post_recv_up_to(int peer, int channel, size_t bytes) override;
  const std::byte* front(int peer, int channel) override;
  size_t front_bytes(int peer, int channel) const override { return incoming_[index(peer, channel)].front_bytes; }
  void pop(int peer, int channel) override;

  void progress() override {}

  uint32_t prepare_wait() override;
  void wait(uint32_t ticket, std::chrono::microseconds limit) override;
  Bell* bell() override { return own_bell_.descriptor() < 0 ? nullptr : &own_bell_; }
  void wake() override;
  void doze(uint32_t ticket, std::chrono::microseconds limit) override;
  bool alert(bool on) override;
  bool take_nudge() override;
  const void* doorbell() const override { return &door().doorbell; }
  bool wakes_by_doorbell() const override { return group_ == nullptr; }
  void nudge() override;

  void check_peers() override;
  void post_failure(const std::string& text) override;
  std::string poll_failure() override;
  const std::atomic<uint32_t>* failure_flag() const override;
  void post_note(int peer, const std::string& text) override;
  std::vector<Note> take_notes() override;
  bool announces_notes() const override { return true; }
  uint32_t prepare_listen() override;
  void listen(uint32_t ticket, std::chrono::microseconds limit) override;
  void wake_listener() override;

 private:
  // The sending end of a ring, which lies in the receiver's region.
  struct Outgoing {
    std::byte* ring;
    uint64_t posted = 0;        // messages published
    uint64_t known_popped = 0;  // last seen value of the receiver's count; read again only when the ring looks full
    size_t slot = 0;            // posted % slots
    size_t acquired = 0;        // length of the message being composed; 0: none
  };
  // The receiving end, in this rank's own region. Posted receives are popped .. expected.
  struct Incoming {
    std::byte* ring;
    uint64_t popped = 0;
    uint64_t expected = 0;
    size_t slot = 0;                   // popped % slots
    const std::byte* front = nullptr;  // what front() returned, until pop()
    size_t front_bytes = 0;
  };
  struct PostedRecv {
    void* dst;
    size_t bytes;
    bool exact;  // else at most so many
  };

  class OwnBell final : public Bell {
   public:
    explicit OwnBell(MappedTransport& owner) : owner_(owner) {}
    int descriptor() const override;
    bool begin_wait(uint32_t ticket) override;
    void end_wait() override;

   private:
    MappedTransport& owner_;
  };

  size_t index(int peer, int channel) const;
  void check_length(size_t bytes) const;
  bool expect(int peer, int channel, const PostedRecv& wanted);
  bool has_room(int peer, int channel, Outgoing& out);
  SlotHeader& slot_at(std::byte* ring, size_t slot) const;
  void publish(int peer, Outgoing& out, size_t bytes);
  PostedRecv& posted_recv(size_t index, uint64_t message);
  std::string peer_name(int peer) const;
  RegionHeader& door() const { return world_->regions[static_cast<size_t>(rank())]->door(); }
  uint32_t signals() const;
  void add_sleeper(uint32_t how);
  void remove_sleeper(uint32_t how);

  const char* name_;
  const std::shared_ptr<const MappedWorld> world_;
  const ForkGuard fork_;
  ArrivalGroup* const group_;  // of this rank; null when there are none
  OwnBell own_bell_{*this};
  bool failure_posted_ = false;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  std::vector<bool> expects_note_;        // per peer: the receive of its next note is posted
  std::vector<PostedRecv> posted_recvs_;  // `slots` per (peer, channel), circular
};

class MappedWindow : public Window {
 public:
  explicit MappedWindow(std::shared_ptr<const MappedWorld> world);

  int local_rank() const override { return world_->rank; }
  int local_size() const override { return world_->layout.size; }
  std::byte* base(int local_rank) const override;
  size_t arena_bytes() const override { return world_->layout.arena_bytes; }
  std::string rank_name(int local_rank) const override { return world_->rank_name(local_rank); }
  BoardEntry& board(int local_rank) override;
  BoardEntry& lane_board(int local_rank) override;
  void notify_all() override;
  const std::vector<std::vector<int>>& groups() const override { return world_->groups; }
  ArrivalGroup& group(int group) override;
  void release_groups(uint64_t ticket) override;
  std::byte* alloc(size_t bytes) override;
  void free(std::byte* block) override;

  const MappedWorld& world() const { return *world_; }
  // Zeroed blocks for regions of subsets (subset.h). They are never freed, but used again as such, once the last of the
  // members has let go of it: until then a peer may read a region, or ring its doorbell, whose owner is done with it.
  virtual std::byte* alloc_region(size_t bytes);
  virtual void retire_region(std::byte* block, size_t bytes);

 private:
  const std::shared_ptr<const MappedWorld> world_;
  const ForkGuard fork_;
  Mutex mutex_;                                                         // the pages need no lock
  std::multimap<size_t, std::byte*> retired_ DCOLL_GUARDED_BY(mutex_);  // bytes -> region
  std::map<size_t, size_t> free_ DCOLL_GUARDED_BY(mutex_);              // offset -> bytes, neighbours merged
  std::map<size_t, size_t> in_use_ DCOLL_GUARDED_BY(mutex_);            // offset -> bytes
};

// Fills in what follows from the rest.
std::shared_ptr<const MappedWorld> complete_world(MappedWorld world);
// Both halves over one world.
Endpoint make_mapped_endpoint(const char* name, MappedWorld world);

}  // namespace dcoll
