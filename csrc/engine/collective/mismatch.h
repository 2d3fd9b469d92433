// What happens when the handshake finds that the ranks called different things: they show each other what they called.
// It is everybody's MismatchError, unless ranks have joined (join.h): then the others go on. Where a rank is ahead of
// the others, it is theirs alone (line_up.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/collective/fabric.h"
#include "engine/collective/line_up.h"
#include "engine/core/operation.h"
#include "engine/core/task.h"
#include "engine/schedule/executor.h"

namespace dcoll {

// An exchange of one record per rank, as all-gather in log n hops over the ordinary transport: for what is rarely
// needed (sizes of ragged collectives between nodes, the report of a mismatch).
template <typename Record>
struct RecordExchange {
  RecordExchange(Fabric& f, const Record& mine)
      : own(mine),
        all(static_cast<size_t>(f.size)),
        executor(*f.transport, f.schedule(plan::Collective::kAllGather, plan::Family::kBruck),
                 {.input = reinterpret_cast<const std::byte*>(&own),
                  .output = reinterpret_cast<std::byte*>(all.data()),
                  .input_layout = Layout::even(sizeof(Record), 1),
                  .output_layout = Layout::even(sizeof(Record) * all.size(), all.size())},
                 f.slice_bytes) {}
  RecordExchange(const RecordExchange&) = delete;
  RecordExchange& operator=(const RecordExchange&) = delete;

  const Record own;
  std::vector<Record> all;  // once the executor is done
  Executor executor;
};

// What one rank called, as it travels: the words for a message, and what a joined rank needs to take part.
struct Called {
  static constexpr size_t kWords = 256;
  uint64_t fingerprint() const { return standing.call; }
  Request stand_in() const;  // an all-reduce of the same fingerprint, without memory

  char words[kWords] = {};
  char reason[kWords] = {};  // of the first call that `standing` counts as refused
  int job_rank = 0;          // of the caller
  Standing standing;
  uint64_t count = 0;
  double prescale = 1.0, postscale = 1.0;
  int device = device::kHost;  // and so by which slices
  uint8_t algo = 0;            // Algo::id
  Encoding encoding{};
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
};

// After a handshake in which ranks showed different fingerprints: tells them apart, and goes on as this rank has to.
// Throws MismatchError, or JoinedError where it is only that ranks have joined and this collective cannot go on without
// them.
// within: what has met it, and is left for what follows: run_collective(), or on_device() before any of it moved.
enum class Within { kCollective, kDevice };
Task resolve_mismatch(Fabric& fabric, Operation& operation, Within within = Within::kCollective);

}  // namespace dcoll
