// A barrier or a small broadcast, all-gather, reduce-scatter or all-to-all inside a node, without a coroutine: what a
// synchronous call tries first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/direct_collectives.h"

namespace dcoll {

// If the peers are late or there is more to move, run_collective takes over from the post. One object serves all calls,
// so that none allocates.
class PullNow {
 public:
  PullNow(Board& board, PullSlots& slots) : board_(board), slots_(slots) {}
  void enter(const PullCall& call);
  uint64_t ticket() const { return ticket_; }
  bool poll();  // true: everybody has entered
  // False: run_collective has to go on. With an operation, a result of any size has a place, and the row counts are
  // told; without, all-gather and all-to-all succeed only where the result is as large as the caller's guess.
  bool finish(Operation* operation);

 private:
  bool all_at_hand() const;
  Pull::Rows rows_from(int rank) const;
  const std::byte* block_of(int rank) const;
  bool gather(Operation* operation);
  void reduce();

  Board& board_;
  PullSlots& slots_;
  PullCall call_;
  std::optional<Contribution> mine_;
  uint64_t ticket_ = 0;
  std::optional<BoardWait> everybody_;
  std::vector<const void*> operands_;  // reused by every reduction
};

}  // namespace dcoll
