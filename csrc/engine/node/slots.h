// Slots: what ranks copy into their arenas for their peers, and the slot form of all-reduce (any memory, small): each
// rank copies its operand into its slot and posts; when all posted, each rank reduces all slots into its own result.
// One barrier. Bytes moved per rank: 2n in, (p+1)n out. Reduction is in rank order, so it equals
// plan::direct_all_reduce bit for bit (tests/engine/all_reduce_test.cc). The other forms: two_shot.h (mapped buffers),
// staged.h (large, any memory).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/types.h"
#include "engine/board/agreement.h"
#include "engine/core/encoded_cost.h"
#include "engine/core/memory.h"
#include "kernels/pack.h"

namespace dcoll {

struct ReduceJob {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;  // may equal in
  size_t count = 0;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1.0;
  double postscale = 1.0;
  Coded coded{};       // between nodes, unless encodes() says no
  bool timed = false;  // for the timeline: note when everybody had entered
  // Of tensors packed at `in`, which is `out`: their whole, in order and without gaps, where the slice that this rank
  // reduces in two shots (two_shot.h) was not packed, because no other rank reads it. {}: all is there.
  std::span<const kernels::Segment> tensors{};
  bool into_tensors = false;  // the sum of that slice is wanted there too, instead of at `out`

  size_t bytes() const { return count * dtype_bytes(dtype); }
};

// What a rank copies into its arena for its peers. 1.5 MiB and 32 KiB per rank, pages of which are taken when first
// used.
//
// Two slots for small operands: slot t % 2 belongs to post t. A rank writes it before post t and peers read it after;
// it is written again before post t+2, when every rank is known to have left t (Board).
//
// Three slots for the pieces of large ones (Staged): slot k % 3 holds piece k of one all-reduce, and is free again once
// its owner has taken the sum out of it.
class Slots {
 public:
  static constexpr size_t kBytes = size_t{16} << 10;            // of a slot for small operands
  static constexpr size_t kMostPieceBytes = size_t{512} << 10;  // of a slot for pieces

  // shared_cores: some ranks wait on the core that another one needs. The same on all ranks.
  Slots(std::shared_ptr<Window> window, Board& board, bool shared_cores);

  // The offset of this rank's slots, to be posted once; and the peers', from their posts.
  uint64_t own_offset() const { return own_offset_; }
  void learn(uint64_t ticket);

  // Where `rank` copies a small operand before its post `ticket`, for all to read once they have seen that.
  std::byte* slot(int rank, uint64_t ticket) const { return slots_[rank] + (ticket % 2) * kBytes; }
  size_t one_shot_bytes() const { return one_shot_bytes_; }  // up to here operands are small; at most kBytes
  size_t piece_bytes(size_t bytes) const;                    // at most, of an operand of so many
  std::byte* piece(int rank, uint64_t k) const { return slots_[rank] + 2 * kBytes + k % kPieces * kMostPieceBytes; }

 private:
  static constexpr size_t kPieces = 3;

  Board& board_;
  size_t one_shot_bytes_;
  size_t least_piece_bytes_;
  std::shared_ptr<Memory> memory_;
  uint64_t own_offset_;
  std::vector<std::byte*> slots_;  // per rank
};

}  // namespace dcoll
