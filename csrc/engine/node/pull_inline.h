// A barrier, or a broadcast, all-gather, reduce-scatter or all-to-all of one round inside a node, without a coroutine:
// what a synchronous call tries first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/node/pull.h"

namespace dcoll {

// If the peers are late or there is more to move, run_collective takes over from the post. One object serves all calls,
// so that none allocates.
class PullNow {
 public:
  PullNow(Board& board, PullSlots& slots) : board_(board), slots_(slots) {}
  void enter(const Call& call);
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

  bool advance(Operation* operation, bool& moved);
  bool take(Operation* operation);
  bool all_at_hand();
  const std::byte* at(const Pull::Block& block, int rank) const;
  void copy_block(const Pull::Block& block, int rank, std::byte* to) const;
  bool gather(Operation* operation);
  void reduce();

  Board& board_;
  PullSlots& slots_;
  Call call_;
  std::optional<Contribution> mine_;
  uint64_t ticket_ = 0;
  std::optional<BoardWait> everybody_;
  Phase phase_ = Phase::kDone;
  bool in_place_ = false;  // some rank's operand is read where it is, so a second post says when that is over
  // Reused by every call, or by every reduction.
  std::vector<Pull::Block> blocks_;
  std::vector<const void*> operands_;
  std::vector<void*> results_;
};

}  // namespace dcoll
