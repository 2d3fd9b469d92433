#include "engine/levels/leader_exchange.h"

#include <cstring>
#include <string>

#include "base/error.h"

namespace dcoll {

LeaderExchange::LeaderExchange(GroupTransport& leaders, FingerprintRange own, std::span<const std::byte> operand,
                               bool direct)
    : leaders_(leaders), range_(own), operand_(operand), peers_(leaders.size()), received_(leaders.size()) {
  message_.range = own;
  message_.bytes = operand.size();
  if (!operand.empty() && operand.size() <= kRidingBytes) std::memcpy(message_.riding, operand.data(), operand.size());
  peers_[leaders.rank()] = {Peer::Send::kDone, Peer::Receive::kDone};
  if (!direct) many_.emplace(leaders, own);
}

bool LeaderExchange::poll(bool& moved) {
  if (many_) return many_->poll(moved);
  const int size = leaders_.size();
  bool done = true;
  // Beginning behind this node, so that not all leaders send to the same one first.
  for (int i = 1; i < size; ++i) {
    const int peer = (leaders_.rank() + i) % size;
    while (tell(peer)) moved = true;
    while (hear(peer)) moved = true;
    done &= peers_[peer].send == Peer::Send::kDone && peers_[peer].receive == Peer::Receive::kDone;
  }
  return done;
}

bool LeaderExchange::send(int peer, const void* data, size_t bytes) {
  std::byte* room = leaders_.acquire_send(peer, kControlChannel, bytes);
  if (room == nullptr) return false;
  std::memcpy(room, data, bytes);
  leaders_.commit_send(peer, kControlChannel);
  return true;
}

// One step of telling `peer`; false when there is none left or no room.
bool LeaderExchange::tell(int peer) {
  Peer& state = peers_[peer];
  switch (state.send) {
    case Peer::Send::kMessage:
      if (!send(peer, &message_, sizeof message_)) return false;
      state.send = operand_.size() > kRidingBytes ? Peer::Send::kOperand : Peer::Send::kDone;
      return true;
    case Peer::Send::kOperand:
      if (!send(peer, operand_.data(), operand_.size())) return false;
      state.send = Peer::Send::kDone;
      return true;
    case Peer::Send::kDone:
      break;
  }
  return false;
}

// One step of hearing from `peer`; false when there is none left or nothing came.
bool LeaderExchange::hear(int peer) {
  Peer& state = peers_[peer];
  switch (state.receive) {
    case Peer::Receive::kPostMessage:
      if (!leaders_.post_recv(peer, kControlChannel, nullptr, sizeof message_)) return false;
      state.receive = Peer::Receive::kMessage;
      return true;
    case Peer::Receive::kMessage: {
      const std::byte* data = leaders_.front(peer, kControlChannel);
      if (data == nullptr) return false;
      Message message;
      std::memcpy(&message, data, sizeof message);
      leaders_.pop(peer, kControlChannel);
      take(peer, message);
      return true;
    }
    case Peer::Receive::kPostOperand:
      if (!leaders_.post_recv(peer, kControlChannel, received_[peer].data(), received_[peer].size())) return false;
      state.receive = Peer::Receive::kOperand;
      return true;
    case Peer::Receive::kOperand:
      if (leaders_.front(peer, kControlChannel) == nullptr) return false;
      leaders_.pop(peer, kControlChannel);
      state.receive = Peer::Receive::kDone;
      return true;
    case Peer::Receive::kDone:
      break;
  }
  return false;
}

void LeaderExchange::take(int peer, const Message& message) {
  const auto refuse = [&](const char* what, size_t bytes) {
    throw TransportError("rank " + std::to_string(leaders_.rank_of(peer)) + " announces an operand of " +
                         std::to_string(message.bytes) + " bytes " + what + " " + std::to_string(bytes) +
                         ". Run the same dcoll version with the same DCOLL_* settings on every rank");
  };
  if (message.bytes > leaders_.max_message_bytes()) {
    refuse("in one message; allowed are", leaders_.max_message_bytes());
  }
  // Who called the same brings an operand of the same length; the others' are not looked at.
  const FingerprintRange& theirs = message.range;
  if (theirs.equal() && message_.range.equal() && theirs.least == message_.range.least &&
      message.bytes != operand_.size()) {
    refuse("where it called for", operand_.size());
  }
  range_.include(theirs);
  received_[peer].resize(message.bytes);
  const bool rode = message.bytes <= kRidingBytes;
  if (rode && message.bytes > 0) std::memcpy(received_[peer].data(), message.riding, message.bytes);
  peers_[peer].receive = rode ? Peer::Receive::kDone : Peer::Receive::kPostOperand;
}

void LeaderExchange::waiting_for(std::vector<int>& ranks) const {
  if (many_) {
    std::vector<int> of_leaders;
    many_->waiting_for(of_leaders);
    for (const int leader : of_leaders) ranks.push_back(leaders_.rank_of(leader));
    return;
  }
  for (int peer = 0; peer < leaders_.size(); ++peer) {
    const Peer& state = peers_[peer];
    if (state.send != Peer::Send::kDone || state.receive != Peer::Receive::kDone) {
      ranks.push_back(leaders_.rank_of(peer));
    }
  }
}

}  // namespace dcoll
