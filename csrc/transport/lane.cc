#include "transport/lane.h"

#include <utility>

namespace dcoll {
namespace {

constexpr int shifted(int channel) { return kLaneChannels + channel; }

class LaneTransport final : public Transport {
 public:
  explicit LaneTransport(Transport& main) : main_(main) {}

  int rank() const override { return main_.rank(); }
  int size() const override { return main_.size(); }
  const char* name() const override { return main_.name(); }
  size_t max_message_bytes() const override { return main_.max_message_bytes(); }

  bool post_send(int peer, int channel, const void* data, size_t bytes) override {
    return main_.post_send(peer, shifted(channel), data, bytes);
  }
  std::byte* acquire_send(int peer, int channel, size_t bytes) override {
    return main_.acquire_send(peer, shifted(channel), bytes);
  }
  void commit_send(int peer, int channel) override { main_.commit_send(peer, shifted(channel)); }
  uint64_t posted(int peer, int channel) const override { return main_.posted(peer, shifted(channel)); }
  uint64_t sent(int peer, int channel) override { return main_.sent(peer, shifted(channel)); }
  bool post_recv(int peer, int channel, void* dst, size_t bytes) override {
    return main_.post_recv(peer, shifted(channel), dst, bytes);
  }
  bool post_recv_up_to(int peer, int channel, size_t bytes) override {
    return main_.post_recv_up_to(peer, shifted(channel), bytes);
  }
  size_t front_bytes(int peer, int channel) const override { return main_.front_bytes(peer, shifted(channel)); }
  const std::byte* front(int peer, int channel) override { return main_.front(peer, shifted(channel)); }
  void pop(int peer, int channel) override { main_.pop(peer, shifted(channel)); }

  void progress() override { main_.progress(); }
  uint32_t prepare_wait() override { return main_.prepare_wait(); }
  void wait(uint32_t ticket, std::chrono::microseconds limit) override { main_.wait(ticket, limit); }
  void wake() override { main_.wake(); }
  void doze(uint32_t ticket, std::chrono::microseconds limit) override { main_.doze(ticket, limit); }
  bool alert(bool on) override { return main_.alert(on); }
  void nudge() override { main_.nudge(); }
  void check_peers() override { main_.check_peers(); }
  void post_failure(const std::string& text) override { main_.post_failure(text); }
  std::string poll_failure() override { return main_.poll_failure(); }

 private:
  Transport& main_;
};

class LaneWindow final : public Window {
 public:
  explicit LaneWindow(std::shared_ptr<Window> main) : main_(std::move(main)) {}

  int local_rank() const override { return main_->local_rank(); }
  int local_size() const override { return main_->local_size(); }
  std::byte* base(int local_rank) const override { return main_->base(local_rank); }
  size_t arena_bytes() const override { return main_->arena_bytes(); }
  std::string rank_name(int local_rank) const override { return main_->rank_name(local_rank); }
  BoardEntry& board(int local_rank) override { return main_->lane_board(local_rank); }
  BoardEntry& lane_board(int local_rank) override { return main_->lane_board(local_rank); }
  void notify_all() override { main_->notify_all(); }
  const std::vector<std::vector<int>>& groups() const override { return no_groups_; }
  ArrivalGroup& group(int group) override { return main_->group(group); }
  void release_group(int group, uint64_t ticket) override { main_->release_group(group, ticket); }
  std::byte* alloc(size_t bytes) override { return main_->alloc(bytes); }
  void free(std::byte* block) override { main_->free(block); }

 private:
  const std::shared_ptr<Window> main_;
  const std::vector<std::vector<int>> no_groups_;
};

}  // namespace

std::unique_ptr<Transport> make_lane(Transport& main) { return std::make_unique<LaneTransport>(main); }
std::shared_ptr<Window> make_lane(std::shared_ptr<Window> main) {
  return std::make_shared<LaneWindow>(std::move(main));
}

}  // namespace dcoll
