// What happens when the handshake finds that the ranks called different things: they show each other what they called.
// It is everybody's MismatchError, unless ranks have joined (join.h): then the others go on. Where a rank is ahead of
// the others, it is theirs alone (line_up.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/collective/fabric.h"
#include "engine/collective/line_up.h"
#include "engine/core/operation.h"
#include "engine/core/task.h"
#include "engine/schedule/executor.h"

namespace dcoll {

// An exchange of one fixed-size record per rank, as ring all-gather over the ordinary transport: for what is rarely
// needed (sizes of ragged collectives between nodes, the report of a mismatch).
struct RecordExchange {
  RecordExchange(Fabric& fabric, const void* mine, size_t bytes);
  std::vector<std::byte> own, all;
  Executor executor;
};

// What one rank called, as it travels: the words for a message, and what a joined rank needs to take part.
struct Called {
  static constexpr size_t kWords = 256;
  static Called of(const Request& request);
  uint64_t fingerprint() const { return standing.call; }
  Request stand_in() const;  // an all-reduce of the same fingerprint, without memory

  char words[kWords] = {};
  char reason[kWords] = {};  // of the first call that `standing` counts as refused
  int job_rank = 0;          // of the caller
  Standing standing;
  uint64_t count = 0;
  double prescale = 1.0, postscale = 1.0;
  uint8_t algo = 0;  // Algo::id
  Encoding encoding{};
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
};

class Mismatch {
 public:
  Mismatch(Fabric& fabric, const Operation& operation);
  Executor& exchange() { return records_.executor; }
  // Once exchanged: how the operation goes on here. Throws MismatchError, or JoinedError where it is only that ranks
  // have joined and this collective cannot go on without them.
  Task resolve(Fabric& fabric, Operation& operation) const;

 private:
  Called call_of(int rank) const;
  std::string text() const;
  bool differs_in_arguments() const;
  Task resolve_in_order(Fabric& fabric, Operation& operation) const;

  int size_;
  RecordExchange records_;
};

}  // namespace dcoll
