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
// Up to 88 bytes travel in the post itself, which is one cache line or two each way.
//
// A large operand in the arena is read in place, and most others that are large by the kernel, if it lets all ranks; a
// barrier at the end tells its owner that it may be changed again. Any other operand passes through the owner's slot,
// cut into as many cells as it has blocks, in rounds: a cell holds the next piece of its block. The first round comes
// with the handshake, so a small collective is one barrier in all. Ranks need not agree on which way their operands go:
// each says so in its post.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "engine/board/agreement.h"
#include "engine/core/call.h"
#include "engine/core/memory.h"
#include "engine/core/operation.h"
#include "engine/core/task.h"
#include "engine/node/peer_memory.h"

namespace dcoll {

// What each rank lays out for its peers: slots in its arena, taken in turn. Slot t % kSlots belongs to post t: its
// owner writes it before post t, peers read it once they have seen that post (release store, acquire load), and it is
// written again for post t + kSlots, when every rank is known to have left t (after t+2 it is: see Board). A slot is a
// table of p + 1 numbers (where the blocks of an all-to-all begin) and the cells.
class PullSlots {
 public:
  // shared_cores: some ranks wait on the core that another one needs. The same on all ranks.
  PullSlots(std::shared_ptr<Window> window, Board& board, bool shared_cores);

  // The offset of this rank's slots, to be posted once as offset_in; and the peers', from their posts.
  uint64_t own_offset() const { return own_offset_; }
  void learn(uint64_t ticket);

  // Once, after learn(): whether this rank can read its peers' private memory; and, from the posts that say so, whether
  // all ranks can (peer_memory.h).
  bool can_read_peers();
  void agree_on_reading(uint64_t ticket) { reads_peers_ = board_.all_say_yes(ticket); }
  bool reads_peers() const { return reads_peers_; }
  void read_peer(int rank, void* to, uint64_t from, size_t bytes) const {
    dcoll::read_peer(introductions_[rank], rank, to, from, bytes);
  }

  // Larger operands are read in place where they are mapped: that needs a second barrier.
  size_t most_mapped_in_slots() const { return shared_cores_ ? 16 << 10 : 2 << 10; }
  // Those with larger blocks are read by the kernel where they are not.
  size_t most_in_slots(Kind kind) const;
  // Whether each cell is read by one rank only.
  bool has_one_reader(Kind kind) const {
    return kind == Kind::kAllToAll || kind == Kind::kReduceScatter || board_.size() == 2;
  }
  // That rank writes to what it has read, so that the lines are its own until the writer takes them back. Lines that
  // one core writes again and again while another only reads them took up to four times as long
  // (docs/notebook/one-node.md).
  static void take_over(const std::byte* cell, size_t bytes);

  // Of this rank's own memory (peer_memory.h). Asks the kernel once for each of the places that are used in turn.
  bool is_readable(const void* at, size_t bytes);

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
  static constexpr size_t kReadable = 64;

  Introduction& introduction(int rank) const {
    return *reinterpret_cast<Introduction*>(slots_[rank] + kSlots * slot_bytes_);  // behind the last slot
  }

  Board& board_;
  const bool shared_cores_;
  const uint64_t word_;  // for the introduction
  bool reads_peers_ = false;
  size_t table_bytes_, data_bytes_, slot_bytes_;
  std::shared_ptr<Memory> memory_;
  uint64_t own_offset_;
  std::vector<std::byte*> slots_;                               // per rank
  std::vector<Introduction> introductions_;                     // the peers', as they were when they were tried
  std::array<std::span<const std::byte>, kReadable> readable_;  // what was found readable last, by address
};

// What this rank contributes: its operand, cut into blocks.
class Contribution {
 public:
  Contribution(const Call& call, int rank, int size);

  const std::byte* data() const { return data_; }
  DType dtype() const { return dtype_; }
  bool is_prescaled() const { return prescale_ != 1.0; }
  bool is_even() const { return ends_.empty(); }

  size_t blocks() const { return blocks_; }
  // Of block b, in bytes; begin(blocks()) is the end of the last.
  uint64_t begin(size_t b) const {
    if (!is_even()) return b == 0 ? 0 : ends_[b - 1];
    return (b * rows_each_ + std::min(b, longer_blocks_)) * row_bytes_;
  }
  size_t bytes() const { return begin(blocks_); }
  size_t longest() const;

  // Puts the round-th piece of each block into its cell.
  void lay_out(std::byte* cells, size_t cell_bytes, size_t round) const;
  // Puts all of it, one block behind the other, beside the next post.
  void lay_out_inline(std::byte* at) const;

 private:
  const std::byte* data_;
  DType dtype_;
  double prescale_;
  size_t blocks_ = 1;
  size_t row_bytes_;
  size_t rows_each_ = 0;        // of a block, where they are of about equal size: the first `longer_blocks_` ones have
  size_t longer_blocks_ = 0;    // one more
  std::vector<uint64_t> ends_;  // of the blocks, in bytes, where they are not
  int skip_;  // the block for this rank alone, which it takes from the operand itself; -1: there is none
};

class Pull final : public Pollable {
 public:
  static constexpr size_t kPieceBytes = size_t{1} << 20;  // moved per poll, so that the driver can look around
  // In a post's offset_in: an address in the rank's own memory. No address and no offset has this bit.
  static constexpr uint64_t kForeign = uint64_t{1} << 63;

  // Enters: lays out what fits into the slot and posts. Returns the number of the post.
  static uint64_t enter(Board& board, PullSlots& slots, const Call& call);

  // The block of a rank for this one, and where it lies.
  struct Block {
    const std::byte* at = nullptr;  // in place, or beside the post
    uint64_t foreign = 0;           // not 0: its address in the memory of the rank's process
    bool in_cell = false;           // else through the rank's slot
    bool through_slots = false;     // whether that rank's blocks for others, too, come through its slot or its post
    uint64_t rows = 0;              // all-gather, all-to-all
    uint64_t bytes = 0;
    uint64_t longest = 0;  // the rank's longest block, for whomever, in bytes
  };
  // What the ranks said of them with post `ticket`. Every word is read once and checked: no block reaches beyond the
  // memory its owner shares. Throws TransportError, which names the rank.
  class Blocks {
   public:
    Blocks(const Board& board, const PullSlots& slots, const Call& call, const Contribution& mine, uint64_t ticket);
    void read(int rank, Block& block) const;

   private:
    uint64_t bytes_of(int rank, uint64_t rows) const {
      const std::optional<size_t> bytes = bytes_of_told(rows, call_.row_elems);
      if (!bytes) [[unlikely]]
        throw_many(rank, rows);
      return *bytes;
    }
    [[noreturn]] void throw_many(int rank, uint64_t rows) const;
    [[noreturn]] void throw_longer(int rank, const Block& block) const;

    const Board& board_;
    const PullSlots& slots_;
    const Call& call_;
    const Contribution& mine_;
    const uint64_t ticket_;
    // Of this rank's block in its own operand; in everybody's, of a reduce-scatter.
    uint64_t begin_ = 0, bytes_, longest_;
  };

  // All ranks have made post `ticket` with equal fingerprints. The first poll allocates the result of ragged ones.
  Pull(Board& board, PullSlots& slots, Operation& operation, uint64_t ticket);
  bool poll(bool& moved) override;
  void waiting_for(std::vector<int>& ranks) const override;

  // What the timeline calls it: how the peers' blocks come, and one more beside others.
  static constexpr std::string_view kInPlace = "pull";
  static std::string_view form_with(const Block& block, std::string_view others);
  std::string_view form() const { return form_; }

 private:
  // A block meant for this rank.
  struct Source {
    Block block;
    int rank = 0;
    std::byte* to = nullptr;  // copied to here; unused by a reduction
    uint64_t taken = 0;       // bytes
  };

  // Whether a rank of `size` that sends each rank `longest` bytes, at most, puts its blocks beside its post.
  static bool is_inline(const Call& call, int size, bool even, uint64_t longest);

  void read_posts();
  void place_sources();
  std::byte* place_output();
  const std::byte* piece(const Source& source) const;
  uint64_t round_end(uint64_t bytes) const;
  bool take();
  bool copy_some();
  bool reduce_some();

  Board& board_;
  PullSlots& slots_;
  Operation& operation_;
  const Call call_;
  const Contribution mine_;
  size_t cell_bytes_;
  std::vector<Source> sources_;        // at first one of each rank, in the order of ranks
  std::vector<const void*> operands_;  // of a reduction
  std::vector<void*> results_;         // of a reduction: what is wanted, and the cells that were read
  uint64_t ticket_;                    // of the round, or of the barrier at the end
  size_t round_ = 0;
  size_t rounds_ = 1;
  bool in_place_ = false;       // somebody's operand is read in place, so a barrier ends it
  bool read_in_place_ = false;  // this rank's is
  std::string_view form_ = kInPlace;
  bool placed_ = false;  // it is known where blocks are copied to
  size_t next_ = 0;      // source under way
};

}  // namespace dcoll
