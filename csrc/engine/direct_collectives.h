// Broadcast, all-gather, reduce-scatter and all-to-all between ranks of one node: the fused forms of the schedules of
// plan/ (reduction in rank order; tests/engine/direct_collectives_test.cc holds them to gather + reduce).
//
// All four are one thing, the pull: every rank shows where the blocks it contributes can be read, and when all have
// shown it, every rank reads the blocks meant for it and writes (or reduces) them into memory of its own. No rank ever
// writes to a peer's result, so results need not be mapped.
//
//   broadcast        the root shows one block, for everyone
//   all-gather       each rank shows one block, for everyone
//   reduce-scatter   each rank shows p blocks, the b-th for rank b, which reduces the p blocks meant for it
//   all-to-all       each rank shows p blocks, the b-th for rank b
//
// A large operand in the arena is read in place; a barrier at the end tells its owner that it may be changed again. Any
// other operand passes through the owner's slot, cut into as many cells as it has blocks, in rounds: a cell holds the
// next piece of its block. The first round comes with the handshake, so a small collective is one barrier in all. Ranks
// need not agree on which way their operands go: each says so in its post.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/agreement.h"
#include "engine/memory.h"
#include "engine/operation.h"
#include "engine/task.h"

namespace dcoll {

// What each rank lays out for its peers: slots in its arena, taken in turn. Slot t % kSlots belongs to post t: its
// owner writes it before post t, peers read it once they have seen that post (release store, acquire load), and it is
// written again for post t + kSlots, when every rank is known to have left t (after t+2 it is: see Board). A slot is a
// table of p + 1 numbers (where the blocks of an all-to-all begin) and the cells.
class PullSlots {
 public:
  PullSlots(std::shared_ptr<Window> window, Board& board);

  // The offset of this rank's slots, to be posted once as offset_in; and the peers', from their posts.
  uint64_t own_offset() const { return own_offset_; }
  void learn(uint64_t ticket);

  // Where block b of `blocks` lies in the slot: cells are of equal size, whole cache lines.
  size_t cell_bytes(size_t blocks) const { return data_bytes_ / blocks / Memory::kAlignment * Memory::kAlignment; }
  uint64_t* table(int rank, uint64_t ticket) const {
    return reinterpret_cast<uint64_t*>(slots_[rank] + (ticket % kSlots) * slot_bytes_);
  }
  std::byte* cells(int rank, uint64_t ticket) const {
    return slots_[rank] + (ticket % kSlots) * slot_bytes_ + table_bytes_;
  }

 private:
  // A slot is written again four posts later, when peers are less likely to hold its lines.
  static constexpr size_t kSlots = 4;
  static constexpr size_t kDataBytes = size_t{256} << 10;
  static constexpr size_t kLeastCellBytes = 512;  // of many ranks

  Board& board_;
  size_t table_bytes_, data_bytes_, slot_bytes_;
  std::shared_ptr<Memory> memory_;
  uint64_t own_offset_;
  std::vector<std::byte*> slots_;  // per rank
};

// What this rank contributes: its operand, cut into blocks.
struct Contribution {
  Contribution(const Request& request, int rank, int size);

  const std::byte* data;
  std::vector<uint64_t> begins;  // of the blocks, in bytes; and the end of the last
  DType dtype;
  double prescale;
  int skip;  // the block for this rank alone, which it takes from the operand itself; -1: there is none

  size_t blocks() const { return begins.size() - 1; }
  size_t bytes() const { return begins.back(); }
  size_t longest() const;
  // Puts the round-th piece of each block into its cell.
  void lay_out(std::byte* cells, size_t cell_bytes, size_t round) const;
};

class Pull final : public Pollable {
 public:
  static bool suits(Kind kind);

  // Enters: lays out what fits into the slot and posts. Returns the number of the post.
  static uint64_t enter(Board& board, PullSlots& slots, const Request& request);

  // All ranks have made post `ticket` with equal fingerprints. The first poll allocates the result of ragged ones.
  Pull(Board& board, PullSlots& slots, Operation& operation, uint64_t ticket);
  // Nothing but slots is to be read, and they are filled: one poll finishes.
  bool ready() const { return rounds_ == 1 && !in_place_; }
  bool poll(bool& moved) override;
  void waiting_for(std::vector<int>& ranks) const override;

 private:
  // A block meant for this rank.
  struct Source {
    const std::byte* in_place;  // null: through the slot of `rank`
    int rank;
    uint64_t bytes;
    std::byte* to;   // copied to here; unused by a reduction
    uint64_t taken;  // bytes
  };

  void count_rounds();
  void find_sources();
  void add_source(int rank, uint64_t begin, uint64_t bytes, std::byte* to);
  void add_all_gather_sources();
  void add_all_to_all_sources();
  std::byte* place_output();
  const std::byte* piece(const Source& source) const;
  uint64_t round_end(uint64_t bytes) const;
  bool take();
  bool copy_some();
  bool reduce_some();

  static constexpr size_t kPieceBytes = size_t{256} << 10;  // moved per poll, so that the driver can look around

  Board& board_;
  PullSlots& slots_;
  Operation& operation_;
  const Contribution mine_;
  size_t cell_bytes_;
  std::vector<Source> sources_;
  std::vector<const void*> operands_;  // of a reduction
  uint64_t ticket_;                    // of the round, or of the barrier at the end
  size_t round_ = 0;
  size_t rounds_ = 1;
  bool in_place_ = false;       // somebody's operand is read in place, so a barrier ends it
  bool read_in_place_ = false;  // this rank's is
  bool found_ = false;          // sources_ is filled
  size_t next_ = 0;             // source under way
};

// A barrier or a small pull without a coroutine: what a synchronous call tries first. If the peers are late or there is
// more to move, run_collective takes over from the post.
class PullNow {
 public:
  PullNow(Board& board, PullSlots& slots, Operation& operation);  // enters
  uint64_t ticket() const { return ticket_; }
  bool poll();    // true: everybody has entered
  bool finish();  // false: run_collective has to go on

 private:
  Board& board_;
  PullSlots& slots_;
  Operation& operation_;
  uint64_t ticket_;
  BoardWait everybody_;
};

}  // namespace dcoll
