// All-reduce on two levels, for operands that do not ride on the agreement (R. Thakur, R. Rabenseifner and W. Gropp,
// "Optimization of Collective Communication Operations in MPICH", 2005, section 4.5, with the reduce-scatter and the
// all-gather of a node done in its shared memory):
//
//   1. reduce-scatter in the node: the buffer is cut into as many slices as the smallest node has ranks (fewer where
//      ranks share cores and slices would be short: plan::carriers_for), and the team of slice j (local ranks j,
//      j + slices, ...) adds up its node's operands, in the order of ranks.
//   2. Between nodes: local rank j, the carrier of slice j, runs an all-reduce of it with the carriers of the other
//      nodes, by a schedule of plan/. All carriers at once, so every network card and core is busy.
//   3. all-gather in the node: every rank copies the slices' results.
//
// So 2(p-1)/p times the buffer leaves each of p nodes, the least possible, and the network never waits for memory: the
// buffer is cut into pieces, which pass the three steps one behind the other, several on the wire at once.
//
//   piece 0   fill  reduce  ===== between nodes =====  take
//   piece 1         fill    reduce  ===== between nodes =====  take
//   piece 2                 fill    reduce  ===== between nodes =====  take
//
// There is no barrier between steps: each rank counts what it has done in memory that its node reads (NodeShared), and
// goes on when the counts allow it. With q for a piece's number and R = Hierarchy::kPieces:
//
//   fill(q)     operand into this rank's slot, unless it can be read in place.  When all reduced > q - R
//   reduce(q)   this rank's share.              When all filled > q; and, into a slot, when all have taken > q - R
//   between(q)  carriers.                       When the team has reduced > q
//   take(q)     unless it lies there already.   When all carriers' arrived > q
//
// Mapped operands are read in place, mapped results written in place. Every rank computes with the same pieces, slices
// and schedules, whatever the memory, and the sums are formed once and copied, so all ranks hold the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "engine/core/task.h"
#include "engine/levels/hierarchy.h"
#include "engine/node/slots.h"
#include "engine/schedule/encoded_all_reduce.h"
#include "engine/schedule/executor.h"

namespace dcoll {

class HierarchicalAllReduce final : public Pollable {
 public:
  // All ranks agreed on `job` and posted `ticket` with the offsets of operand and result.
  HierarchicalAllReduce(Hierarchy& hierarchy, const ReduceJob& job, uint64_t ticket);
  bool poll(bool& moved) override;
  void waiting_for(std::vector<int>& ranks) const override;
  bool waits_indirectly() const override { return take_.piece < pieces_.count && reduce_.piece > take_.piece; }

 private:
  // Worked on per poll, so that messages are moved along in between.
  static constexpr size_t kBytesPerPoll = size_t{128} << 10;
  using Count = NodeShared::Count NodeShared::*;

  // Of this rank's work on a piece, in order: what is done of piece `piece`, in bytes.
  struct Cursor {
    size_t piece = 0;
    size_t at = 0;
  };
  struct Flight {
    std::unique_ptr<GroupTransport> transport;
    std::unique_ptr<Pollable> exchange;  // null: done
  };

  Span piece(size_t k) const { return pieces_.piece(k); }
  static Span part(Span whole, size_t index, size_t parts);
  Span slice(size_t k, int carrier) const { return part(piece(k), carrier, carriers_); }
  Span share(size_t k) const;
  bool carries() const { return h_.local_rank() < carriers_; }
  const std::byte* operand(int local, size_t k, size_t at) const;
  std::byte* result(int carrier, size_t k, size_t at) const;

  uint64_t number(size_t k) const { return base_ + k; }
  uint64_t counted(Count count, int local) const;
  bool all_counted(Count count, uint64_t pieces) const;
  void add_uncounted(Count count, uint64_t pieces, std::vector<int>& ranks) const;
  void publish(Count count, size_t pieces);

  bool move_network();
  void launch(size_t k);
  std::unique_ptr<Pollable> exchange(GroupTransport& carriers, std::byte* data, Span mine) const;
  bool may_launch(size_t k) const;
  bool may_reduce(size_t k) const;
  bool may_fill(size_t k) const;
  bool reduce_some();
  bool fill_some();
  bool take_some();
  bool finished() const;

  Hierarchy& h_;
  const ReduceJob job_;
  const int carriers_;                 // local ranks 0, 1, ... of each node
  const uint64_t base_;                // number of piece 0
  std::vector<const std::byte*> ins_;  // per local rank: its operand, where it can be read in place; else null
  std::vector<std::byte*> outs_;       // per carrier: its result, where peers can reach it; else null
  const EqualPieces pieces_;           // of the bytes

  Cursor fill_, reduce_, take_;
  size_t launched_ = 0, arrived_ = 0;
  size_t banks_ = 1;  // pieces that may be under way at once, each on channels of its own
  int channels_ = 1;  // of a bank
  std::shared_ptr<const plan::Schedule> schedule_;
  std::deque<Flight> flights_;  // of pieces arrived_ .. launched_
  std::vector<const void*> sources_;
};

}  // namespace dcoll
