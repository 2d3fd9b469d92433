// How a collective begins: every rank shows what it called, over whatever the ranks share, and learns whether all
// called the same. For a direct all-reduce that is also the first barrier, often the only one.
#pragma once

#include <cstdint>
#include <variant>

#include "engine/board/agreement.h"
#include "engine/collective/choose_path.h"
#include "engine/collective/fabric.h"
#include "engine/collective/rider.h"
#include "engine/core/operation.h"
#include "engine/core/task.h"
#include "engine/levels/hierarchical_agreement.h"

namespace dcoll {

// How a synchronous call has entered already: with enter_all_reduce, or with a PullNow's post.
struct Entry {
  bool all_reduce = false;
  uint64_t ticket = 0;
  bool taken = false;  // only everybody's post `ticket` is still to come
};

// A member of the coroutine, which awaits everybody(): a coroutine of its own would be an allocation in every call.
class Handshake {
 public:
  // Shows what this rank called, unless it has entered. two_levels: the all-reduce, on that path; else null.
  Handshake(Fabric& fabric, Operation& operation, const Call& call, Path path, const Entry& entry,
            const ReduceJob* two_levels);
  Handshake(const Handshake&) = delete;
  Handshake& operator=(const Handshake&) = delete;

  // Until all ranks have shown theirs; null for a rank alone.
  Pollable* everybody() const { return everybody_; }
  // Then, once: whether all called the same. Takes what rode along.
  bool agreed();
  // Agreed, and that was all.
  bool done() const { return done_; }
  // The post on the board of the node.
  uint64_t ticket() const { return ticket_; }

 private:
  // By messages.
  struct Riding {
    Riding(Fabric& f, const Call& call, Path path, uint64_t fingerprint)
        : rider(call, path, f.size, f.slice_bytes), everybody(*f.transport, fingerprint, rider.operand()) {}
    Rider rider;
    Dissemination everybody;
  };

  Fabric& f_;
  Operation& op_;
  uint64_t ticket_;
  bool done_;
  // std::monostate: by fabric.all_reduce, or not at all.
  std::variant<std::monostate, BoardWait, HierarchicalAgreement, Riding> way_;
  Pollable* everybody_ = nullptr;
};

// Whether a synchronous call may enter on its own thread, without a coroutine, so that nothing is allocated in the
// steady state: all-reduces by enter_all_reduce(), everything else in fabric.pull_now. Both are polled by the caller;
// if the peers are late, run_collective takes over.
bool enters_inline(const Fabric& fabric, const Call& call);
// Begins an all-reduce in fabric.all_reduce.
void enter_all_reduce(Fabric& fabric, const Call& call, uint64_t fingerprint, Phases& phases);

// NodeAllReduce::own_slice, where the call takes that form; else empty.
Span own_slice(const Fabric& fabric, const Call& call);

// For the timeline: the all-reduce has moved on from the agreement.
void note_agreement(const NodeAllReduce& all_reduce, Phases& phases);

// What is to be reduced. Codecs aside: inside a node nothing is encoded.
void set_job(ReduceJob& job, const Call& call, int size);

}  // namespace dcoll
