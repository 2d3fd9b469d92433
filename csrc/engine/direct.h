// All-reduce over memory the node's ranks have mapped: the hand-fused forms of plan::direct_all_reduce (reduction in
// rank order, so they equal that schedule bit for bit; tests/engine/all_reduce_test.cc holds them to it).
//
// Slot (any memory, small): each rank copies its operand into its slot and posts; when all posted, each rank reduces
// all slots into its own result. One barrier. Bytes moved per rank: 2n in, (p+1)n out.
//
// Staged (any memory, large): the slot form applied to one slot-sized piece after the other, in two alternating slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/types.h"
#include "engine/agreement.h"
#include "engine/memory.h"
#include "engine/task.h"

namespace dcoll {

struct ReduceJob {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;  // may equal in
  size_t count = 0;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1.0;
  double postscale = 1.0;

  size_t bytes() const { return count * dtype_bytes(dtype); }
};

// Two slots per rank in its arena, and where the peers' slots are. Slot t % 2 belongs to post t: a rank writes it
// before post t and peers read it after; it is written again before post t+2, when every rank is known to have left t
// (Board).
class Slots {
 public:
  static constexpr size_t kBytes = size_t{64}
                                   << 10;  // two of them and the peers' stay in L2; measured best of 16 to 256 KiB

  Slots(std::shared_ptr<Window> window, Board& board);

  // The offset of this rank's slots, to be posted once; and the peers', from their posts.
  uint64_t own_offset() const { return own_offset_; }
  void learn(uint64_t ticket);

  void fill(uint64_t ticket, const ReduceJob& job, size_t begin, size_t count);    // before post `ticket`
  void reduce(uint64_t ticket, const ReduceJob& job, size_t begin, size_t count);  // once all posted `ticket`

 private:
  std::byte* slot(int rank, uint64_t ticket) const;

  Board& board_;
  std::shared_ptr<Memory> memory_;
  uint64_t own_offset_;
  std::vector<std::byte*> slots_;     // per rank
  std::vector<const void*> sources_;  // reused by every reduce
};

class Staged final : public Pollable {
 public:
  // filled: the post before which every rank has put the first piece into its slot, or 0 if they have not.
  Staged(Board& board, Slots& slots, const ReduceJob& job, uint64_t filled);
  bool poll(bool& moved) override;
  void waiting_for(std::vector<int>& ranks) const override;

 private:
  Board& board_;
  Slots& slots_;
  ReduceJob job_;
  size_t at_ = 0;  // elements finished
  size_t piece_;   // elements of the piece at at_
  uint64_t ticket_;
  bool posted_;
};

}  // namespace dcoll
