// Two-shot all-reduce of operands and results that every rank of the node has mapped (Rabenseifner's reduce-scatter and
// all-gather, with loads and stores for messages: "Optimization of Collective Reduction Operations", 2004). Rank r
// reduces slice r of all p operands and writes it to all p results; a barrier ends it. Moves 2pn bytes over the node,
// the minimum for p private results. With a prescale factor each rank first scales its operand into its own result,
// and the results are then the operands: one more barrier.
//
// One object per communicator, used for one operation after the other, so that none of them allocates memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/board/agreement.h"
#include "engine/core/layout.h"
#include "engine/core/task.h"
#include "engine/node/slots.h"
#include "kernels/reduce.h"

namespace dcoll {

class TwoShot final : public Pollable {
 public:
  // Both are looked at from begin() to the end: a call of a few KiB would feel a copy.
  TwoShot(Board& board, const ReduceJob& job, const kernels::Reduction& reduction);

  // Of an operand of so many bytes, what this rank reduces.
  static Span slice(size_t bytes, int rank, int ranks) { return part_on_lines(bytes, Memory::kAlignment, rank, ranks); }

  // All ranks posted `ticket`, with the offsets of their operand and result.
  void begin(uint64_t ticket);
  bool poll(bool& moved) override;
  void waiting_for(std::vector<int>& ranks) const override;

 private:
  static constexpr size_t kPieceBytes = size_t{256} << 10;  // worked on per poll, so that the driver can look around
  enum class Phase { kScaling, kAllScaled, kReducing, kAllReduced };

  void begin_reducing();
  void scale_piece();
  void reduce_piece();
  void reduce(size_t bytes);
  void post_and_wait_in(Phase phase);

  Board& board_;
  const ReduceJob& job_;
  const kernels::Reduction& reduction_;
  std::vector<const void*> ins_;  // per rank: what is left of the slice, in its operand ...
  std::vector<void*> outs_;       // ... and in its result
  Phase phase_ = Phase::kAllReduced;
  size_t at_ = 0, end_ = 0;  // bytes of the operand still to work on in this phase
  std::optional<BoardWait> everybody_;
};

}  // namespace dcoll
