// All-reduce of memory that peers cannot read: two-shot over the slots, piece by piece. For piece k:
//
//   1. Fill: each rank copies the slices of its operand that others reduce into its slot. Its own slice stays where it
//      is.
//   2. Reduce: rank r reduces slice r of all operands, in rank order, and writes the sum to its own result and to all
//      slots, over what it has just read.
//   3. Collect: each rank copies the other slices of the result out of its slot.
//
// One barrier per piece: step k waits until all ranks have reduced piece k-1 and filled piece k, reduces k, posts, and
// collects k-1 and fills k+2 while the peers get there. So three slots in turn are enough. A rank whose operand and
// result are mapped is read and written in place; it neither fills nor collects.
//
// One object per communicator, used for one operation after the other, so that none of them allocates memory.
//
// Why the sum goes back over the lines it was read from: a core that reads a line and then writes it takes the line
// over from its last writer. Lines that one core writes again and again while another only reads them, as in the slot
// form, took three times as long on cores that share no L2. The slot form also moves (p-1)n bytes into each rank, this
// 2(p-1)n/p.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/board/agreement.h"
#include "engine/core/layout.h"
#include "engine/core/task.h"
#include "engine/node/slots.h"

namespace dcoll {

class Staged final : public Pollable {
 public:
  // Before the post with which a rank enters, unless the post says that its operand and result are mapped.
  static void fill_first(Board& board, Slots& slots, const ReduceJob& job);

  // `job` is looked at from begin() to the end.
  Staged(Board& board, Slots& slots, const ReduceJob& job);

  // All ranks have posted `ticket`, with the offsets of operand and result or with the first piece in the slot.
  void begin(uint64_t ticket);
  bool poll(bool& moved) override;
  void waiting_for(std::vector<int>& ranks) const override;

 private:
  static constexpr size_t kBytesPerPoll = size_t{1} << 20;  // a fraction of a millisecond; then the driver looks around

  static EqualPieces cut(const ReduceJob& job, const Slots& slots);
  static void fill(Board& board, Slots& slots, const ReduceJob& job, const EqualPieces& pieces, size_t piece);
  void reduce(size_t piece);
  void collect(size_t piece);

  Board& board_;
  Slots& slots_;
  const ReduceJob& job_;
  EqualPieces pieces_;                 // of the elements
  std::vector<const std::byte*> ins_;  // per rank: its operand, where mapped; else null
  std::vector<std::byte*> outs_;
  std::vector<const void*> sources_;  // reused by every reduce
  std::vector<void*> results_;
  size_t step_ = 0;
  uint64_t ticket_ = 0;  // the post that step_ waits for
};

}  // namespace dcoll
