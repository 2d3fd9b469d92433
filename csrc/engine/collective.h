// Every collective, as one coroutine: agree on what is called, exchange sizes where they may differ, then move the data
// by the path that suits the memory and the topology.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/agreement.h"
#include "engine/direct.h"
#include "engine/direct_collectives.h"
#include "engine/operation.h"
#include "engine/task.h"
#include "plan/algorithms.h"
#include "plan/schedule.h"
#include "plan/topology.h"
#include "transport/transport.h"

namespace dcoll {

// What a communicator's collectives work with. `board` and the slots exist where all ranks share mapped memory.
struct Fabric {
  Transport* transport = nullptr;
  std::shared_ptr<Window> window;
  std::unique_ptr<Board> board;
  std::unique_ptr<Slots> slots;
  std::unique_ptr<PullSlots> pull_slots;
  uint64_t slots_posted = 0;  // the post that tells where this rank's slots are; 0 once all of them are known
  plan::Topology topology;
  int rank = 0;
  int size = 1;
  size_t slice_bytes = 64 << 10;
  std::string algo;  // configured: "auto" or a name

  // The schedule of this rank, built once per (collective, algorithm, root).
  std::shared_ptr<const plan::Schedule> schedule(plan::Collective collective, const std::string& algorithm, int root);
  // The name of the algorithm the cost model predicts to be fastest.
  const std::string& fastest_all_reduce(size_t bytes);

 private:
  struct Cached {
    plan::Collective collective;
    std::string algorithm;
    int root;
    std::shared_ptr<const plan::Schedule> schedule;
  };
  std::vector<Cached> cache_;
  std::array<std::string, 64> fastest_;  // per power of two
};

// How a rank entered a collective over the board: the post it made, and whether its operand lay in its slot by then.
struct Entry {
  uint64_t ticket = 0;  // 0: not entered yet
  bool in_slot = false;
};

// Whether PullNow may be tried.
bool pulls_now(const Fabric& fabric, const Request& request);

// The whole collective. `entry`: already made by OneShot or PullNow.
Task run_collective(Fabric& fabric, Operation& operation, Entry entry = {});

// A small all-reduce over mapped memory without a coroutine: what a synchronous call tries first. One barrier, no
// allocation. If the peers are late, run_collective takes over from entry().
class OneShot {
 public:
  static bool suits(const Fabric& fabric, const Request& request);
  OneShot(Fabric& fabric, const Request& request);  // enters
  bool poll() { return everybody_.poll(moved_); }   // true: everybody has entered
  bool finish();                                    // false: the ranks called different things, run_collective tells
  const Entry& entry() const { return entry_; }

 private:
  Fabric& fabric_;
  ReduceJob job_;
  Entry entry_;
  BoardWait everybody_;
  bool moved_ = false;
};

}  // namespace dcoll
