// Every collective, as one coroutine: agree on what is called, exchange sizes where they may differ, then move the data
// by the path that suits the memory and the topology.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/log.h"
#include "engine/agreement.h"
#include "engine/hierarchy.h"
#include "engine/line_up.h"
#include "engine/link_constants.h"
#include "engine/node_all_reduce.h"
#include "engine/operation.h"
#include "engine/pull_now.h"
#include "engine/slots.h"
#include "engine/task.h"
#include "plan/algorithms.h"
#include "plan/schedule.h"
#include "plan/topology.h"
#include "transport/transport.h"

namespace dcoll {

// What a communicator's collectives work with. Board, slots and the direct all-reduce exist where all ranks
// share mapped memory; the hierarchy where some do, on several nodes.
struct Fabric {
  Transport* transport = nullptr;
  std::shared_ptr<Window> window;
  std::unique_ptr<Board> board;
  std::unique_ptr<Slots> slots;
  std::unique_ptr<NodeAllReduce> all_reduce;
  std::unique_ptr<PullSlots> pull_slots;
  std::unique_ptr<PullNow> pull_now;  // of synchronous calls
  std::unique_ptr<Hierarchy> hierarchy;
  uint64_t slots_posted = 0;  // the post that tells where this rank's slots are; 0 once all of them are known
  plan::Topology topology;
  LinkConstants links;  // where the topology's constants are from, or are to come from
  int rank = 0;
  int job_rank = 0;  // what messages call this rank
  int size = 1;
  size_t slice_bytes = 64 << 10;
  std::string algo;  // configured: "auto" or a name
  const Log* log = nullptr;
  OutOfStep out_of_step;

  // Where all ranks share memory: board, slots and the direct forms.
  void connect_slots();

  // The schedule of this rank, built once per (collective, algorithm, root).
  std::shared_ptr<const plan::Schedule> schedule(plan::Collective collective, const std::string& algorithm, int root);
  // What the cost model predicts to be fastest, for a buffer of so many bytes (the larger of input and output).
  struct Fastest {
    std::string algorithm;  // empty: not asked yet
    size_t slice_bytes = 0;
  };
  const Fastest& fastest(plan::Collective collective, size_t bytes);
  // After the topology's constants have changed.
  void forget_choices() { fastest_ = {}; }

 private:
  struct Cached {
    plan::Collective collective;
    std::string algorithm;
    int root;
    std::shared_ptr<const plan::Schedule> schedule;
  };
  std::vector<Cached> cache_;
  std::array<std::array<Fastest, 64>, 5> fastest_;  // per collective and power of two
};

// How a synchronous call has entered already: with enter_all_reduce, or with a PullNow's post.
struct Entry {
  bool all_reduce = false;
  uint64_t ticket = 0;
  bool taken = false;  // only everybody's post `ticket` is still to come
};

// The whole collective, from its beginning or from `entry` on.
Task run_collective(Fabric& fabric, Operation& operation, Entry entry = {});

// Begins an all-reduce in fabric.all_reduce, without a coroutine: what a synchronous call polls on its own thread, so
// that nothing is allocated in the steady state. False, and nothing is done, where this call takes another path. If the
// peers are late, run_collective takes over.
bool enter_all_reduce(Fabric& fabric, const ReduceCall& call, Phases& phases);

// NodeAllReduce::own_slice, where the call takes that form; else empty.
TwoShot::Slice own_slice(const Fabric& fabric, const ReduceCall& call);

// For the timeline: the all-reduce has moved on from the agreement.
void note_agreement(const NodeAllReduce& all_reduce, Phases& phases);

// What runs a queued operation: a collective, or the rounds of a join (join.h).
Task start_collective(Fabric& fabric, Operation& operation);

// Whether fabric.pull_now may be tried.
bool pulls_now(const Fabric& fabric, Kind kind);

}  // namespace dcoll
