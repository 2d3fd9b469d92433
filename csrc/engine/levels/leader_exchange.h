// The agreement between nodes, by messages of their leaders: each tells the least and the greatest fingerprint that its
// ranks showed, until all know those of all. An operand of a few KiB rides along.
//
// Up to plan::kMaxDirectNodes leaders tell each other directly: one step. The first message has a fixed length,
// so that it can be received whatever the other called; it says how long the operand that follows is, if it did not fit
// in. More leaders use the dissemination barrier (agreement.h) and no operand rides along.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/board/agreement.h"
#include "engine/core/task.h"
#include "transport/group_transport.h"

namespace dcoll {

class LeaderExchange final : public Pollable {
 public:
  // `operand` is copied before this returns to whoever polls; empty where none rides along. All leaders of a call that
  // agrees bring equally long ones.
  LeaderExchange(GroupTransport& leaders, FingerprintRange own, std::span<const std::byte> operand, bool direct);
  bool poll(bool& moved) override;
  // As ranks of the communicator.
  void waiting_for(std::vector<int>& ranks) const override;

  bool equal() const { return many_ ? many_->equal() : range_.equal(); }
  // The operand of node `node`, once finished and equal; not of this one.
  const std::byte* operand(int node) const { return received_[node].data(); }

 private:
  static constexpr size_t kRidingBytes = 128 - sizeof(FingerprintRange) - sizeof(uint64_t);
  struct Message {
    FingerprintRange range;
    uint64_t bytes;
    std::byte riding[kRidingBytes];
  };
  struct Peer {
    enum class Send : uint8_t { kMessage, kOperand, kDone } send = Send::kMessage;
    enum class Receive : uint8_t {
      kPostMessage,
      kMessage,
      kPostOperand,
      kOperand,
      kDone
    } receive = Receive::kPostMessage;
  };

  bool send(int peer, const void* data, size_t bytes);
  bool tell(int peer);
  bool hear(int peer);
  void take(int peer, const Message& message);

  GroupTransport& leaders_;
  std::optional<Dissemination> many_;  // where there are too many to tell each other directly
  FingerprintRange range_;
  std::span<const std::byte> operand_;
  Message message_{};
  std::vector<Peer> peers_;
  std::vector<std::vector<std::byte>> received_;  // by node
};

}  // namespace dcoll
