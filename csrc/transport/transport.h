// How slices move between ranks. One implementation per medium: mapped memory (mapped/mapped.h; ranks as threads in
// mapped/local.h, processes of a node in mapped/shm.h), and messages by MPI (mpi.h) or UCX (ucx.h). Router (router.h)
// picks one per peer.
//
// Contract
//   - Messages are FIFO per (sender, receiver, channel). Channels 0 .. kMaxChannels-1 carry schedules.
//   - A message is at most max_message_bytes() long and never empty.
//   - post_* never block. All calls of one Transport are made under the owner's lock: no implementation locks for
//     itself.
//   - post_send: the transport may read `data` until sent(peer, channel) has counted that message; only then may the
//     memory be written or freed. Sends on one (peer, channel) complete in order.
//   - acquire_send/commit_send: the caller composes the message in the transport's own memory (one at a time per (peer,
//     channel)); nothing of the caller's is pinned.
//   - post_recv states the exact length of the next message; front() returns the oldest posted receive's bytes once
//     they have all arrived, and pop() lets go of them. Bytes received into transport memory are valid until pop().
//   - Memory order: whatever a rank wrote before post_send/commit_send is visible to the receiver after front()
//     returned that message (release/acquire for mapped memory, MPI's own guarantee elsewhere).
//   - Errors throw TransportError or PeerError naming the peer.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "transport/bell.h"

namespace dcoll {

inline constexpr int kMaxChannels = 8;
// Channel used by the engine's own handshakes and small exchanges, never by schedules.
inline constexpr int kControlChannel = kMaxChannels;
// What one sequence of collectives uses. There are two: channels 0 .. kLaneChannels-1, and the same again for the lane
// of operations that meet by name (engine/communicator/named_lane.h).
inline constexpr int kLaneChannels = kMaxChannels + 1;
inline constexpr int kNamesChannel = 2 * kLaneChannels;      // which names are ready, and in which order they run
inline constexpr int kNotesChannel = kNamesChannel + 1;      // what ranks ask each other about a stall
inline constexpr int kPointChannel = kNotesChannel + 1;      // messages between two ranks (engine/p2p),
inline constexpr int kPointDataChannel = kPointChannel + 1;  // and the slices of large ones
inline constexpr int kAllChannels = 2 * kLaneChannels + 4;

// A rank's word that it waits in vain, so that others do not take it for the cause of their own waiting.
struct StallNote {
  int rank = 0;
  std::vector<int> waits_for;
  Clock::time_point heard;
};

// A short text from another rank, beside the data.
struct Note {
  int from = 0;
  std::string text;
};

// What collectives need.
class Messages {
 public:
  virtual ~Messages() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // The longest message this transport carries; the engine's slices are no longer than the least over all peers and
  // ranks.
  virtual size_t max_message_bytes() const = 0;

  // False when there is no room now; nothing happened, try again later.
  virtual bool post_send(int peer, int channel, const void* data, size_t bytes) = 0;
  // Room for a message of `bytes` in the transport's memory, or nullptr when there is none now. Calling again before
  // commit_send returns the same room.
  virtual std::byte* acquire_send(int peer, int channel, size_t bytes) = 0;
  virtual void commit_send(int peer, int channel) = 0;
  // Messages ever posted or committed to (peer, channel), and how many of them no longer need the caller's memory.
  virtual uint64_t posted(int peer, int channel) const = 0;
  virtual uint64_t sent(int peer, int channel) = 0;

  // False when too many receives are posted already. dst == nullptr: keep the bytes in the transport's memory.
  virtual bool post_recv(int peer, int channel, void* dst, size_t bytes) = 0;
  // The same for a message whose length only its sender knows: at most `bytes`, into the transport's memory.
  virtual bool post_recv_up_to(int peer, int channel, size_t bytes) = 0;
  // The oldest posted receive's bytes (dst, if one was given), or nullptr while they have not all arrived.
  virtual const std::byte* front(int peer, int channel) = 0;
  // How many bytes front() returned.
  virtual size_t front_bytes(int peer, int channel) const = 0;
  virtual void pop(int peer, int channel) = 0;

  // Moves things along where the medium needs it (MPI). Cheap when there is nothing to do.
  virtual void progress() = 0;
};

// What a rank with nothing to do needs.
//
// A wait: prepare_wait() returns a ticket; if the caller then finds nothing to do it calls wait(ticket, limit),
// which returns when any peer acted towards this rank after the ticket was drawn, or `limit` passed, or wake() was
// called (possibly early for no reason). Media that cannot be waited on return after at most a short poll interval.
//
// A doze, of a thread with nothing to do: until wake(), or a peer's nudge() while alert(true) holds, or `limit` passed.
// What peers do otherwise does not end it, so they need not pay for waking anybody. As with wait(), look (take_nudge())
// between prepare_wait() and doze().
class Sleep {
 public:
  virtual ~Sleep() = default;

  virtual uint32_t prepare_wait() = 0;
  virtual void wait(uint32_t ticket, std::chrono::microseconds limit) = 0;
  // A wait for two transports at once: of this one's peers, and what rings the bell, whose ticket this is. False, at
  // once, where this one cannot wait on a descriptor.
  virtual bool wait_beside(Bell& /*bell*/, uint32_t /*ticket*/, std::chrono::microseconds /*limit*/) { return false; }
  // Rung by whatever ends a wait() of this transport; null where there is none.
  virtual Bell* bell() { return nullptr; }
  // Whether a wait() now ends with the message, so that looking again and again only takes the core from whoever brings
  // it: the kernel, where messages come over sockets.
  virtual bool sleeps_well() const { return false; }
  // Ends a wait() of this rank's from another thread of this process. Needs no lock.
  virtual void wake() = 0;

  // Needs no lock; nor does alert(), which returns false where peers cannot nudge.
  virtual void doze(uint32_t ticket, std::chrono::microseconds limit) = 0;
  virtual bool alert(bool on) = 0;
  // Whether a peer has nudged since alert(true), or since this was last asked.
  virtual bool take_nudge() { return false; }
  // Several transports of a process may be woken by one doorbell: a wait() or doze() of any of them ends when a peer
  // acts towards this rank over any other whose wakes_by_doorbell() holds, and tickets are of the doorbell. Null: none.
  virtual const void* doorbell() const { return nullptr; }
  virtual bool wakes_by_doorbell() const { return false; }
  // For a rank that waits in vain: ends the doze of each peer whose alert holds. Cheap where there is none. Needs no
  // lock.
  virtual void nudge() {}
};

// What ranks tell each other beside the data.
class Notices {
 public:
  virtual ~Notices() = default;

  // Throws PeerError if a peer is known to be gone (its process ended, its socket closed). Called rarely (~10 times/s
  // while waiting).
  virtual void check_peers() = 0;

  // Failure notices: the first cause travels to everyone, once, best effort, without waiting.
  virtual void post_failure(const std::string& text) = 0;
  // After a failure: ends what still reads or writes memory of the caller's, in `limit` at most. False if something may
  // go on doing so, e.g. a message half of which is there, of a peer that is gone. Nothing is posted or received after.
  virtual bool let_go(std::chrono::milliseconds /*limit*/) { return true; }
  // A peer's failure text, or an empty string. Cheap: called in every progress loop.
  virtual std::string poll_failure() = 0;
  // Where a look at memory tells whether there is a notice: not zero then. Null: ask poll_failure(). Read relaxed, the
  // notice itself comes from poll_failure().
  virtual const std::atomic<uint32_t>* failure_flag() const { return nullptr; }

  // Stalls: tells everybody, best effort, that this rank waits in vain for these; and the latest word of each other
  // rank. Only media whose ranks cannot see for themselves who has come so far.
  virtual void post_stall(const std::vector<int>& /*waits_for*/) {}
  virtual std::vector<StallNote> stall_notes() const { return {}; }

  // Notes: what ranks ask each other about a stall. Best effort, in order, without waiting; cut off after
  // kMostNoteBytes or the longest message. They reach a rank that calls nothing, through a thread that sleeps in
  // listen(), as in wait(): until a note came since the ticket was drawn, wake_listener() was called or `limit` has
  // passed. Where announces_notes() is false a note does not end the sleep. prepare_listen(),
  // listen() and wake_listener() need no lock.
  static constexpr size_t kMostNoteBytes = 2000;
  virtual void post_note(int /*peer*/, const std::string& /*text*/) {}
  virtual std::vector<Note> take_notes() { return {}; }
  virtual bool announces_notes() const { return false; }
  virtual uint32_t prepare_listen() { return 0; }
  virtual void listen(uint32_t /*ticket*/, std::chrono::microseconds /*limit*/) {}
  virtual void wake_listener() {}
};

class Transport : public Messages, public Sleep, public Notices {
 public:
  virtual const char* name() const = 0;  // "local", "shm", "mpi", "ucx", "router"
  // Whether a message waits for its connection, which is made by this rank's calling progress(). Needs no lock.
  virtual bool connecting() const { return false; }
  // Begins to close: what was sent still arrives, and other calls find nothing to do. Goes on with that each time it is
  // asked, without waiting. True when no peer has to help with what is left, for which the destructor would wait.
  virtual bool wind_up() { return true; }
};

}  // namespace dcoll
