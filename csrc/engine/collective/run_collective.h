// Every collective, as one coroutine: agree on what is called, then move the data by the path that suits the call, the
// memory and the topology (choose_path.h).
#pragma once

#include "engine/collective/fabric.h"
#include "engine/core/operation.h"
#include "engine/core/task.h"

namespace dcoll {

// How a synchronous call has entered already: with enter_all_reduce, or with a PullNow's post.
struct Entry {
  bool all_reduce = false;
  uint64_t ticket = 0;
  bool taken = false;  // only everybody's post `ticket` is still to come
};

// The whole collective, from its beginning or from `entry` on.
Task run_collective(Fabric& fabric, Operation& operation, Entry entry = {});

// Whether a synchronous call may enter on its own thread, without a coroutine, so that nothing is allocated in the
// steady state: all-reduces by enter_all_reduce(), everything else in fabric.pull_now. Both are polled by the caller;
// if the peers are late, run_collective takes over.
bool enters_inline(const Fabric& fabric, const Call& call);
// Begins an all-reduce in fabric.all_reduce.
void enter_all_reduce(Fabric& fabric, const Call& call, Phases& phases);

// NodeAllReduce::own_slice, where the call takes that form; else empty.
TwoShot::Slice own_slice(const Fabric& fabric, const Call& call);

// For the timeline: the all-reduce has moved on from the agreement.
void note_agreement(const NodeAllReduce& all_reduce, Phases& phases);

// What runs a queued operation: a collective, or the rounds of a join (join.h).
Task start_collective(Fabric& fabric, Operation& operation);

}  // namespace dcoll
