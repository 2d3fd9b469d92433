// What the collectives of a communicator work with: the medium, what they have in memory that ranks share, and the
// schedules and choices that were made before.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/log.h"
#include "engine/board/agreement.h"
#include "engine/collective/line_up.h"
#include "engine/collective/nccl_state.h"
#include "engine/core/algo.h"
#include "engine/core/encoded_cost.h"
#include "engine/levels/hierarchy.h"
#include "engine/links/coding.h"
#include "engine/links/link_constants.h"
#include "engine/links/trial.h"
#include "engine/node/device_memory.h"
#include "engine/node/node_all_reduce.h"
#include "engine/node/pull_inline.h"
#include "engine/node/slots.h"
#include "plan/algorithms.h"
#include "plan/encoded.h"
#include "plan/schedule.h"
#include "plan/topology.h"
#include "transport/transport.h"

namespace dcoll {

// What the fabrics of one communicator have in common.
struct FabricSettings {
  int rank = 0;
  int job_rank = 0;  // what messages call this rank
  int size = 1;
  size_t slice_bytes = 64 << 10;
  Algo algo = "auto";  // configured
  bool compress_local = false;
  bool by_host = false;  // DCOLL_GPU_ENGINE=host
  const Log* log = nullptr;
  std::atomic<bool>* told_uncompressed = nullptr;
};

// Board, slots and the direct all-reduce exist where all ranks share mapped memory; the hierarchy where some do, on
// several nodes.
struct Fabric : FabricSettings {
  Messages* transport = nullptr;
  std::shared_ptr<Window> window;
  std::unique_ptr<Board> board;
  std::unique_ptr<Slots> slots;
  std::unique_ptr<NodeAllReduce> all_reduce;
  std::unique_ptr<PullSlots> pull_slots;
  std::unique_ptr<PullNow> pull_now;  // of synchronous calls
  std::unique_ptr<DeviceMemory> device_memory;
  std::unique_ptr<NcclState> nccl;  // null: not asked for
  std::unique_ptr<Hierarchy> hierarchy;
  uint64_t slots_posted = 0;  // the post that tells where this rank's slots are; 0 once all of them are known
  plan::Topology topology;
  LinkConstants links;  // where the topology's constants are from, or are to come from
  EncodedCosts encoded_costs;
  Codings codings;  // as learn_constants() has found them
  bool told_saturated = false, told_by_host = false;
  OutOfStep out_of_step;

  // Where all ranks share memory: board, slots and the direct forms.
  void connect_slots();
  // Whether a codec may be used here for so many bytes (encodes() in choose_path.h), and whether ranks then encode for
  // each other, each a share of an operand.
  bool may_encode(size_t bytes) const {
    return size > 1 && (compress_local || (board == nullptr && bytes > Request::kSmallBytes));
  }
  bool shares_encoding() const { return hierarchy != nullptr; }
  void tell(LogLevel level, const std::string& text) const { (*log)(level, text); }
  // What all ranks know: on rank 0 alone.
  void tell_for_all(LogLevel level, const std::string& text) const {
    if (rank == 0) tell(level, text);
  }
  // Once, on rank 0, if no call may: that what was asked for is not done.
  void tell_uncompressed() const;

  // The schedule of this rank, built once per algorithm and root.
  std::shared_ptr<const plan::Schedule> schedule(const plan::Algorithm& algorithm, int root = 0);
  std::shared_ptr<const plan::Schedule> schedule(plan::Collective collective, plan::Family family) {
    return schedule(plan::algorithm_of(collective, family));
  }
  // What the cost model predicts to be fastest, for a buffer of so many bytes (the larger of input and output).
  struct Fastest {
    const plan::Algorithm* algorithm = nullptr;  // null: not asked yet
    size_t slice_bytes = 0;
  };
  const Fastest& fastest(plan::Collective collective, size_t bytes);
  // Whether an all-reduce of so much float32 goes encoded: because that is predicted to be faster or, where it is not
  // clear, was in the first calls, or in turns while these are made. False until its coding is known.
  bool pays(const kernels::Encoding& encoding, size_t bytes) const;
  // Such calls that are made to find that out; null: none are. settle() is what follows once they are done, from how
  // long they took on all ranks.
  Trial* trial(const kernels::Encoding& encoding, size_t bytes);
  void settle(const kernels::Encoding& encoding, size_t bytes, double plain_us_per_byte, double encoded_us_per_byte);
  // Whether selections of so many elements (kernels::Codec::kTopK) go by owners.
  bool goes_by_owners(const kernels::Encoding& encoding, size_t count) const;
  // Of a call that is encoded.
  Coded coded(const Call& call, EncodedCost& cost) const;
  // After the topology's constants have changed.
  void forget_choices() {
    fastest_ = {};
    weighed_.clear();
    by_owners_ = {};
  }

 private:
  struct Cached {
    const plan::Algorithm* algorithm;
    int root;
    std::shared_ptr<const plan::Schedule> schedule;
  };
  struct Weighed {
    kernels::Encoding encoding;
    size_t bytes;
    bool pays;
    std::unique_ptr<Trial> trial;
  };
  static constexpr size_t kMostWeighed = 256;
  Weighed* weighed(const kernels::Encoding& encoding, size_t bytes) const;
  void tell_choice(const kernels::Encoding& encoding, size_t bytes, const plan::EncodedTimes& times,
                   const char* how) const;

  std::vector<Cached> cache_;
  mutable std::vector<Weighed> weighed_;
  mutable std::array<std::optional<bool>, 64> by_owners_;  // per power of two of a selection's bytes
  std::array<std::array<Fastest, 64>, 5> fastest_;         // per collective and power of two
};

}  // namespace dcoll
