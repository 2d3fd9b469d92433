#include "transport/lane.h"

#include <utility>
#include <vector>

#include "transport/group_transport.h"

namespace dcoll {
namespace {

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
  void release_groups(uint64_t ticket) override { main_->release_groups(ticket); }
  std::byte* alloc(size_t bytes) override { return main_->alloc(bytes); }
  void free(std::byte* block) override { main_->free(block); }

 private:
  const std::shared_ptr<Window> main_;
  const std::vector<std::vector<int>> no_groups_;
};

}  // namespace

std::unique_ptr<Messages> make_lane(Messages& main) {
  return std::make_unique<GroupTransport>(main, kLaneChannels, kLaneChannels + kControlChannel);
}
std::shared_ptr<Window> make_lane(std::shared_ptr<Window> main) {
  return std::make_shared<LaneWindow>(std::move(main));
}

}  // namespace dcoll
