// A barrier, or a broadcast, all-gather, reduce-scatter or all-to-all of one round inside a node, without a coroutine:
// what a synchronous call tries first.
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
  // True: it is done, or run_collective has to go on. With an operation, a result of any size has a place, and the row
  // counts are told; without, all-gather and all-to-all succeed only where the result is as large as the caller's
  // guess.
  bool poll(Operation* operation, bool& moved);
  bool done() const { return phase_ == Phase::kDone; }
  // Where run_collective goes on: after which post, and whether that is the last and this rank has all it came for.
  uint64_t ticket() const { return ticket_; }
  bool taken() const { return phase_ == Phase::kTaken; }

 private:
  enum class Phase { kEntered, kTaken, kDone, kLeft };

  bool take(Operation* operation);
  bool all_at_hand();
  Pull::Rows rows_from(int rank) const;
  uint64_t begin_of(int rank) const;
  const std::byte* block_of(int rank) const;
  bool lies_in_slot(int rank) const;
  void copy_block(int rank, std::byte* to, uint64_t bytes) const;
  bool gather(Operation* operation);
  void reduce();

  Board& board_;
  PullSlots& slots_;
  PullCall call_;
  std::optional<Contribution> mine_;
  uint64_t ticket_ = 0;
  std::optional<BoardWait> everybody_;
  Phase phase_ = Phase::kDone;
  bool in_place_ = false;  // some rank's operand is read where it is, so a second post says when that is over
  std::vector<const void*> operands_;  // reused by every reduction ...
  std::vector<void*> results_;         // ... as this is
};

}  // namespace dcoll
