// What a communicator over several nodes needs to work on two levels: the board and the shared memory of this rank's
// node, and the ranks it exchanges messages with on the other nodes. Used by one collective after the other.
//
// Every rank of a node owns one block of memory that all of them have mapped:
//
//   NodeShared | 2 small slots | kPieces operand slots | kPieces result slots
//
// A small slot belongs to post t of the board (t % 2), as in slots.h. The slots of pieces belong to piece q % kPieces,
// where q counts the pieces of all collectives; who may write and read them when follows from the counts in NodeShared
// (hierarchical_all_reduce.h).
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "engine/board/agreement.h"
#include "engine/core/memory.h"
#include "engine/levels/node_map.h"
#include "plan/hierarchical.h"
#include "plan/schedule.h"
#include "plan/topology.h"
#include "transport/group_transport.h"
#include "transport/transport.h"
#include "transport/window.h"

namespace dcoll {

// Each part is written by the rank that owns it and read by its node's ranks.
struct NodeShared {
  // Pieces so far. Memory order: added to with release after what they count was done, read with acquire before it is
  // built upon.
  struct alignas(128) Count {
    std::atomic<uint64_t> pieces{0};
  };
  Count filled;   // the operand of so many pieces may be read
  Count reduced;  // this rank's share of so many pieces was reduced; it reads their operands no more
  Count arrived;  // the result of this carrier's slice of so many pieces is there
  Count taken;    // this rank has copied the results of so many pieces

  // What the leader tells its node. `ticket` is the post the rest is about: stored last (release), read first
  // (acquire). Written again for the next post, when all ranks have made it and so have read this.
  struct alignas(128) Verdict {
    static constexpr size_t kInlineBytes = 128 - 2 * sizeof(uint64_t);
    std::atomic<uint64_t> ticket{0};
    uint64_t equal = 0;
    std::byte result[kInlineBytes] = {};
  };
  Verdict verdict;

  // The ranks of other nodes that this rank waits for, so that its peers, who wait for this rank, can name the cause.
  // Relaxed: only read into messages. -1 ends the list.
  struct alignas(128) Missing {
    std::array<std::atomic<int32_t>, 16> ranks{};
  };
  Missing missing;
};

class Hierarchy {
 public:
  static constexpr size_t kPieces = 4;
  static constexpr size_t kLine = Memory::kAlignment;  // where pieces are cut into parts

  // slice_bytes: the longest message. little_memory: the arena was made so small that pieces must be small too. Both
  // are the same on all ranks.
  Hierarchy(Messages& transport, std::shared_ptr<Window> window, NodeMap map, plan::Topology links, size_t slice_bytes,
            bool little_memory);

  const NodeMap& map() const { return map_; }
  bool little_memory() const { return little_memory_; }
  Board& board() { return board_; }
  size_t slice_bytes() const { return slice_bytes_; }
  int local_rank() const { return map_.local_rank; }
  int local_size() const { return map_.local_size(); }
  bool leads() const { return map_.local_rank == 0; }

  // The first post tells where each rank's memory is. Must be complete before the first collective.
  uint64_t first_post() const { return first_post_; }
  bool connected() const { return connected_; }
  void learn();

  NodeShared& shared(int local) const { return *reinterpret_cast<NodeShared*>(blocks_[local]); }
  NodeShared& own() const { return shared(map_.local_rank); }
  std::byte* small_slot(int local, uint64_t ticket) const;
  std::byte* operand_slot(int local, uint64_t piece) const;
  std::byte* result_slot(int local, uint64_t piece) const;
  // What an all-reduce of so many bytes is cut into, for so many carriers. In each piece blocks and selections begin
  // anew, so the results of an encoded one depend on it. It then depends on nothing that is measured.
  size_t piece_bytes(size_t bytes, int carriers, bool encoded) const;
  // How many ranks of each node carry it: local ranks 0, 1, ...
  int carriers_for(size_t bytes) const;
  // All-reduces of up to this many bytes ride on the agreement.
  size_t small_bytes() const { return small_bytes_; }

  // The leaders of all nodes: local rank 0 of each.
  GroupTransport& leaders() { return leaders_; }
  // The carriers of this rank's slice, on the channels of bank `bank` of `channels` each.
  std::unique_ptr<GroupTransport> carriers(int bank, int channels);
  // This rank's part of the all-reduce between its slice's carriers, for a slice of so many bytes, one of `carriers`.
  struct Between {
    std::shared_ptr<const plan::Schedule> schedule;
    int channels = 1;  // the most that any of the carriers uses
  };
  const Between& between(size_t bytes, int carriers);
  // The same of an all-reduce whose messages are encoded (schedule/encoded_all_reduce.h).
  struct Encoded {
    std::shared_ptr<const plan::Schedule> to_owners, to_everybody;
    int channels = 1;
  };
  const Encoded& encoded();
  // The links were measured: later choices are made anew. All ranks call it before the same collective.
  void use(const plan::Constants& constants);

  // Pieces of all collectives so far; the same on all ranks of a node.
  uint64_t pieces_begun = 0;

  // For messages: the ranks of other nodes that this rank waits for, told to its node; and those that `local` told of,
  // or, if it told of none, `local` itself.
  void tell_missing(const std::vector<int>& ranks) const;
  void add_missing(int local, std::vector<int>& ranks) const;
  // The ranks of this node that have not made post `ticket` of the board.
  void add_absent(uint64_t ticket, std::vector<int>& ranks) const;

 private:
  std::shared_ptr<const plan::Schedule> build(const plan::Algorithm& algorithm, int& channels) const;

  Messages& transport_;
  const std::shared_ptr<Window> window_;
  const NodeMap map_;
  plan::Topology links_;  // of the whole communicator
  const size_t slice_bytes_;
  const bool little_memory_;
  const size_t piece_bytes_;   // at most
  const size_t result_bytes_;  // of a result slot
  const size_t small_bytes_;
  Board board_;
  std::shared_ptr<Memory> memory_;
  std::vector<std::byte*> blocks_;  // per local rank
  GroupTransport leaders_;
  uint64_t first_post_;
  bool connected_ = false;
  Encoded encoded_;
  std::map<std::pair<int, size_t>, Between> between_of_;  // per number of carriers and power of two of bytes
};

}  // namespace dcoll
