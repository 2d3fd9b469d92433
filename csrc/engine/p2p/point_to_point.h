// Messages between two ranks of a communicator, matched by tag, beside its collectives: over channels of their own
// (transport.h), so that neither waits for the other.
//
//   small (eager)        The sender copies it into the transport and is done, whether or not anybody receives. Who has
//                        no receive for it yet keeps it.
//   large (rendezvous)   The sender offers it: where it lies. Once a receive is there, the receiver reads it: out of
//                        the sender's arena, or its private memory (peer_memory.h), in one copy, and says that it is
//                        done. Where it can read neither it asks for it, and the sender sends it in slices. A
//                        sender that waits writes a part of a long one itself (one_copy.h).
//
// Messages of one sender with one tag meet receives in the order in which they were sent; receives that would take any
// rank's take what comes first. A receive with room for more takes what comes, as MPI's and Gloo's do. One without room
// for it is an error, on both sides: the sender of a small message, which may be done by then, hears of it with its
// next call that involves this rank (take_complaint).
//
// A rank that leaves sends nothing any more, and who waits for that would wait until its deadline. So a rank that has
// waited long asks those it waits for to tell it when they leave. Programs that go well send nothing for this.
//
// Nothing blocks: what does not go now waits in an outbox, so any number of messages may be under way both ways. A rank
// looks at what its peers say once it has sent to them or receives from them, and not before: who sends no messages
// pays nothing for this.
//
// All functions are called under the communicator's drive lock.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/core/operation.h"
#include "engine/core/point.h"
#include "engine/p2p/one_copy.h"
#include "engine/p2p/point_message.h"
#include "transport/transport.h"
#include "transport/window.h"

namespace dcoll {

// The ranks of a communicator, as far as this needs to know them.
struct PointRanks {
  Transport* transport = nullptr;
  std::shared_ptr<Window> window{};           // null: no memory in common
  std::vector<int> in_window{};               // by rank: its number in the window, or -1
  std::vector<int> job_ranks{};               // by rank: what messages call it
  const std::atomic<int>* waiters = nullptr;  // threads of this rank that wait; null: it writes nothing for receivers
};

// Of a message that waited for a rank which has left.
std::exception_ptr error_of_leaving(const Request& request, const std::string& rank, const std::string& why);

class PointToPoint {
 public:
  // finish: what is done when an operation is, with its error or null.
  using Finish = std::function<void(std::shared_ptr<Operation>, std::exception_ptr)>;
  PointToPoint(PointRanks ranks, Finish finish);

  // A send or a receive: Request::root is the peer, Request::tag the key. A receive's `source` is set when it is done.
  void submit(std::shared_ptr<Operation> operation);
  // Looks for what was said and does what can be done.
  void advance(bool& moved);

  // Whether anything is under way, or left to tell.
  bool busy() const { return open_ > 0 || unsent_ > 0; }
  // A small message that this rank sent to the peer met a receive without room for it; "": none did. Says each once.
  std::string take_complaint(int peer);
  // This rank has waited long for that one: it is asked to say should it leave.
  void ask_to_be_told(int peer);
  // This rank sends and receives nothing any more but what is under way. Those that ask, or have asked, hear so, and
  // why, if there is a reason. The first call counts.
  void leave(const std::string& why);
  // What is under way.
  void for_each(const std::function<void(Operation&)>& look) const;
  // After a failure: has senders write to this rank's memory no more, and waits so long for what they have begun to.
  // Whether they are done.
  bool let_go(Clock::duration limit) noexcept;
  // Finishes all of it with this error. Needs no memory.
  void abandon(std::exception_ptr error);

 private:
  using What = PointMessage::What;
  // A receive, until it is done: waiting for its message in a bin, then for its bytes in reading_ or Peer::coming.
  struct Receive {
    uint64_t key;
    int peer;  // or kAnySource
    std::byte* data;
    size_t bytes;
    std::shared_ptr<Operation> operation;
    // Of the message that it met.
    int source = kAnySource;
    uint32_t id = 0;
    Reading reading{};        // in one copy
    bool unreadable = false;  // it was tried
    size_t at = 0;            // in slices: bytes that are here,
    size_t expected = 0;      // and for which a receive is posted
  };
  using Receives = std::list<Receive>;
  // A message that no receive has met.
  struct Arrived {
    int source;
    PointMessage head;
    std::vector<std::byte> data;  // eager
    PointOffer offer;
  };
  struct Bin {  // of a key; at any time at most one of both has messages of one source
    Receives posted;
    std::list<Arrived> arrived;
  };
  // What is to be told, or a small message, which is copied unless `operation` waits for it to go.
  struct Unsent {
    PointMessage head;
    std::vector<std::byte> data;
    std::shared_ptr<Operation> operation;
  };
  struct Sliced {
    std::shared_ptr<Operation> operation;
    size_t at = 0;      // bytes that were given to the transport
    uint64_t last = 0;  // once all are: the number of the last slice
  };
  struct Peer {
    int rank;
    bool expecting = false;  // a receive is posted on kPointChannel
    std::deque<Unsent> outbox;
    size_t outbox_bytes = 0;
    std::unordered_map<uint32_t, std::shared_ptr<Operation>> offered;
    uint32_t last_offer = 0;
    std::list<Writing> writing;  // of those offered
    std::deque<Sliced> leaving;  // in the order asked for
    Receives coming;             // likewise
    std::deque<std::string> complaints;
    bool asked = false;               // by this rank, to say when it leaves,
    bool asks = false;                // and the same of this one
    std::optional<std::string> left;  // it has, and why
    enum class Memory { kUnknown, kReadable, kClosed } memory = Memory::kUnknown;  // its private one
    Introduction who;                                                              // whose memory it is

    // Its private memory, by this rank, which may write to it then, too. It introduces itself in what it says.
    bool can_be_read(const Introduction& introduction);
  };

  Peer& peer(int rank);
  void meet(int rank);
  void begin_send(std::shared_ptr<Operation> operation);
  void offer(Peer& to, std::shared_ptr<Operation> operation);
  void tell(Peer& to, const PointMessage& head, const void* data, size_t bytes,
            std::shared_ptr<Operation> operation = nullptr);
  bool put(Peer& to, const PointMessage& head, const void* data, size_t bytes);
  void empty_outbox(Peer& to, bool& moved);

  void begin_receive(Receive receive);
  void hear(Peer& from, bool& moved);
  void take(Peer& from, const std::byte* data, size_t bytes);
  void take_answer(Peer& from, const PointMessage& head, const std::byte* data, size_t bytes);
  void forget_empty(uint64_t key);
  void match(Peer& from, const PointMessage& head, const std::byte* data, size_t bytes);
  void deliver(Receives& list, Receives::iterator receive, Peer& from, const PointMessage& head, const std::byte* data);
  void refuse(Receives& list, Receives::iterator receive, Peer& from, const PointMessage& head);

  // point_leaving.cc: what is not to come any more.
  void tell_of_leaving(Peer& to);
  void take_leaving(Peer& from, std::string why);
  const Peer* left_waiting_by(int peer) const;

  // point_transfers.cc: what is large.
  void begin_reading(Receives& list, Receives::iterator receive, Peer& from, const PointOffer& offer);
  void ask(Receives& list, Receives::iterator receive, Peer& from);
  void read_on(bool& moved);
  void begin_writing(Peer& to, const PointMessage& head, const PointShare& share);
  void write_on(Peer& to, bool& moved);
  void send_slices(Peer& to, bool& moved);
  void receive_slices(Peer& from, bool& moved);

  void finish(Receives& list, Receives::iterator receive, std::exception_ptr error);
  void finish(std::shared_ptr<Operation> operation, std::exception_ptr error);
  std::string name(int rank) const;
  std::string length_text(bool sent_here, size_t sent, size_t wanted, int other, uint64_t key) const;
  [[noreturn]] void throw_damaged(const Peer& from, const std::string& what) const;

  const PointRanks ranks_;
  const Finish finish_;
  const size_t most_eager_;                   // larger messages are offered
  const uint64_t word_;                       // see Introduction
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank; null where nothing was ever said
  std::vector<Peer*> known_;                  // those that are there
  std::unordered_map<uint64_t, Bin> bins_;
  Receives reading_;
  PieceWords words_;
  size_t open_ = 0;    // operations and receives under way
  size_t unsent_ = 0;  // in all outboxes
  size_t complaints_ = 0;
  size_t left_ = 0;                    // peers that have
  std::optional<std::string> leaves_;  // this rank has, and why
};

}  // namespace dcoll
