// Some ranks of a communicator as a communicator of their own: a view of its transport that numbers peers by their
// place in the group and channels from `first_channel` on. So schedules built for the group run over it unchanged, and
// two schedules on different channels run side by side. The control channel is the whole communicator's, unless another
// is named.
#pragma once

#include <utility>
#include <vector>

#include "base/ranks_text.h"
#include "transport/transport.h"

namespace dcoll {

class GroupTransport final : public Messages {
 public:
  // `ranks`: of the group, as `whole` numbers them; `own`: the place of this rank among them.
  GroupTransport(Messages& whole, std::vector<int> ranks, int own, int first_channel = 0,
                 int control_channel = kControlChannel)
      : whole_(whole),
        ranks_(std::move(ranks)),
        own_(own),
        first_channel_(first_channel),
        control_channel_(control_channel) {}
  // Of everybody.
  GroupTransport(Messages& whole, int first_channel, int control_channel = kControlChannel)
      : GroupTransport(whole, ranks_below(static_cast<size_t>(whole.size())), whole.rank(), first_channel,
                       control_channel) {}

  int rank_of(int peer) const { return ranks_[peer]; }

  int rank() const override { return own_; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  size_t max_message_bytes() const override { return whole_.max_message_bytes(); }

  bool post_send(int peer, int channel, const void* data, size_t bytes) override {
    return whole_.post_send(ranks_[peer], shifted(channel), data, bytes);
  }
  std::byte* acquire_send(int peer, int channel, size_t bytes) override {
    return whole_.acquire_send(ranks_[peer], shifted(channel), bytes);
  }
  void commit_send(int peer, int channel) override { whole_.commit_send(ranks_[peer], shifted(channel)); }
  uint64_t posted(int peer, int channel) const override { return whole_.posted(ranks_[peer], shifted(channel)); }
  uint64_t sent(int peer, int channel) override { return whole_.sent(ranks_[peer], shifted(channel)); }
  bool post_recv(int peer, int channel, void* dst, size_t bytes) override {
    return whole_.post_recv(ranks_[peer], shifted(channel), dst, bytes);
  }
  bool post_recv_up_to(int peer, int channel, size_t bytes) override {
    return whole_.post_recv_up_to(ranks_[peer], shifted(channel), bytes);
  }
  size_t front_bytes(int peer, int channel) const override {
    return whole_.front_bytes(ranks_[peer], shifted(channel));
  }
  const std::byte* front(int peer, int channel) override { return whole_.front(ranks_[peer], shifted(channel)); }
  void pop(int peer, int channel) override { whole_.pop(ranks_[peer], shifted(channel)); }

  void progress() override { whole_.progress(); }

 private:
  int shifted(int channel) const { return channel == kControlChannel ? control_channel_ : channel + first_channel_; }

  Messages& whole_;
  const std::vector<int> ranks_;
  const int own_;
  const int first_channel_, control_channel_;
};

}  // namespace dcoll
