// The handshake of a communicator over several nodes, in three steps:
//
//   1. Every rank shows its fingerprint on its node's board.
//   2. The leader of each node has seen all of them, and exchanges the least and the greatest with the other leaders.
//   3. It tells its node the verdict.
//
// A small all-reduce is no more than that: operands lie beside the posts (up to 88 bytes) or in the small slots when
// the ranks post, the leader adds up its node's, in the order of ranks, the sums travel with the fingerprints, every
// leader adds them up in the order of nodes, and the result comes with the verdict. So the bits are the same on all
// ranks. One step between nodes, whatever the number of ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/core/task.h"
#include "engine/levels/hierarchy.h"
#include "engine/levels/leader_exchange.h"
#include "engine/node/slots.h"

namespace dcoll {

class HierarchicalAgreement final : public Pollable {
 public:
  // `job`: the all-reduce to be done, or null for other calls.
  HierarchicalAgreement(Hierarchy& hierarchy, uint64_t fingerprint, const ReduceJob* job);
  bool poll(bool& moved) override;
  void waiting_for(std::vector<int>& ranks) const override;
  bool waits_indirectly() const override { return phase_ == Phase::kExchange || phase_ == Phase::kVerdict; }

  bool equal() const { return equal_; }
  // Whether the all-reduce was small, and is done.
  bool reduced() const { return equal_ && small_; }
  // The post that tells where each rank's operand and result lie.
  uint64_t ticket() const { return ticket_; }

 private:
  enum class Phase { kConnect, kShown, kExchange, kVerdict, kDone };

  void show();
  void begin_exchange();
  void reduce_node();
  void tell_verdict();
  bool take_verdict();
  const std::byte* operand(int local) const;

  Hierarchy& h_;
  const uint64_t fingerprint_;
  const ReduceJob* const job_;
  const bool small_;
  Phase phase_ = Phase::kConnect;
  uint64_t ticket_ = 0;
  bool equal_ = false;
  std::vector<std::byte> sum_;  // of this node, on the leader
  std::vector<const void*> sources_;
  std::optional<LeaderExchange> exchange_;
};

// Until all ranks of this node have come here. The last thing before they leave: the verdict lies in the leader's
// memory, which it gives back, and by then everybody has read it.
class NodeBarrier final : public Pollable {
 public:
  NodeBarrier(Hierarchy& hierarchy, uint64_t fingerprint);
  bool poll(bool& moved) override;
  void waiting_for(std::vector<int>& ranks) const override { h_.add_absent(ticket_, ranks); }

 private:
  Hierarchy& h_;
  const uint64_t ticket_;
};

}  // namespace dcoll
