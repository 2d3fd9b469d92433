// Operations that meet by name: ranks may submit them in different orders. They are a second sequence of collectives
// beside the ordered one, whose order rank 0 decides. It has channels and a board of its own, but the same memory,
// messages, doorbell and failures: it costs nothing to have, and one wait sleeps on both.
//
//   1. A rank that submits a name tells rank 0 that it is ready.
//   2. Rank 0 appends a name to the order once every rank is ready for it, and tells everybody.
//   3. Every rank runs the collectives of the lane in that order. Shape, dtype and the rest are compared by the
//      handshake each of them begins with.
//
// Names travel as 64-bit hashes of kind and name, up to five in one message of 48 bytes, which mapped memory carries in
// one cache line: two such messages, one after the other, are all that a name costs. There is no timer, and no cycle:
// every look of a driver takes along what there is. Receives are posted only while an answer is due, so that a job that
// uses no names pays nothing.
//
// A rank that joined (join.h) is ready for every name. It tells rank 0 how often it has joined by now; rank 0 takes the
// ranks with more joins than have ended for joined. A join ends on each rank in its own time: while rank 0 is behind
// another rank in that, it does not know who has joined, and orders nothing.
//
// All functions are called under the communicator's drive lock.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "engine/collective/fabric.h"
#include "engine/core/operation.h"
#include "transport/transport.h"

namespace dcoll {

class NamedLane {
 public:
  // `main`: the ordered sequence, whose transport and memory are shared.
  explicit NamedLane(const Fabric& main);

  // What stands for kind and name.
  static uint64_t id_of(const Request& request);

  void submit(std::shared_ptr<Operation> operation);
  // Tells, hears and orders; what is to run now goes to `running`. Throws TransportError.
  void exchange(std::deque<std::shared_ptr<Operation>>& running, bool& moved);

  // This rank joins, or all ranks have.
  void join();
  void join_ended();

  // Nothing left to tell and nothing submitted that is not ordered yet.
  bool idle() const;
  // idle(), and no receive is posted or due.
  bool asleep() const;
  // Submitted, and not ordered yet.
  const std::unordered_map<uint64_t, std::shared_ptr<Operation>>& waiting() const { return waiting_; }
  // The ranks that are known not to have submitted it: on rank 0 exactly those, elsewhere rank 0 is who knows.
  std::vector<int> waits_for(uint64_t id) const;
  // Forgets everything, after a failure; returns waiting().
  std::unordered_map<uint64_t, std::shared_ptr<Operation>> abandon();

  Fabric& fabric() { return fabric_; }

 private:
  struct Message {
    static constexpr uint16_t kNames = 5;
    uint16_t count = 0;
    uint16_t joined = 0;  // whether the sender is in its last join now
    uint32_t joins = 0;   // of the sender
    uint64_t ids[kNames] = {};
  };
  // What there is to tell a peer, and whether its next message is expected.
  struct Peer {
    std::deque<uint64_t> outbox;
    bool joins_told = true;
    bool expecting = false;
    size_t lacks = 0;    // rank 0: own names that this peer has not submitted
    uint32_t joins = 0;  // rank 0: how often it has joined
    uint32_t joins_ended = 0;
    void forget() {  // without memory, which an assignment of {} would need
      outbox.clear();
      joins_told = true;
      expecting = false;
      lacks = joins = joins_ended = 0;
    }
  };
  using Queue = std::deque<std::shared_ptr<Operation>>;

  bool decides() const { return fabric_.rank == 0; }
  bool is_joined() const { return joins_ > joins_ended_; }
  bool joined(int rank) const { return (rank == 0 ? joins_ : peers_[rank].joins) > joins_ended_; }
  bool awaits(int peer) const;
  void tell(int peer, bool& moved);
  void hear(int peer, Queue& running, bool& moved);
  void take(int peer, const Message& message, Queue& running);
  void ready(int rank, uint64_t id);
  void order_what_is_ready(Queue& running);
  bool all_ready(const std::vector<bool>& ready_ranks) const;
  void run(uint64_t id, Queue& running);

  Messages* names_;  // the communicator's own transport
  std::unique_ptr<Messages> transport_;
  Fabric fabric_;
  std::vector<Peer> peers_;  // by rank; in use: those rank 0 talks to, and rank 0
  std::unordered_map<uint64_t, std::shared_ptr<Operation>> waiting_;
  uint32_t joins_ = 0, joins_ended_ = 0;

  // Rank 0.
  std::unordered_map<uint64_t, std::vector<bool>> ready_;  // by rank
  std::vector<uint64_t> changed_;                          // names to look at again
};

}  // namespace dcoll
