#include "transport/mapped/subset.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "transport/mapped/mapped.h"

namespace dcoll {
namespace {

// A block of this rank's arena that only ever holds regions.
class RegionBlock {
 public:
  RegionBlock(std::shared_ptr<MappedWindow> window, size_t bytes)
      : window_(std::move(window)), bytes_(bytes), data_(window_->alloc_region(bytes)) {}
  ~RegionBlock() { window_->retire_region(data_, bytes_); }
  RegionBlock(const RegionBlock&) = delete;
  RegionBlock& operator=(const RegionBlock&) = delete;
  std::byte* data() const { return data_; }

 private:
  const std::shared_ptr<MappedWindow> window_;
  const size_t bytes_;
  std::byte* const data_;
};

class SubsetWatch final : public PeerWatch {
 public:
  SubsetWatch(std::shared_ptr<PeerWatch> whole, std::vector<int> members)
      : whole_(std::move(whole)), members_(std::move(members)) {}
  std::vector<int> ended() override {
    std::vector<int> ranks;
    for (const int peer : whole_->ended()) {
      const auto found = std::find(members_.begin(), members_.end(), peer);
      if (found != members_.end()) ranks.push_back(static_cast<int>(found - members_.begin()));
    }
    return ranks;
  }
  int pid(int peer) const override { return whole_->pid(members_.at(static_cast<size_t>(peer))); }

 private:
  const std::shared_ptr<PeerWatch> whole_;
  const std::vector<int> members_;
};

// Board and doorbells of the subset, arenas of the whole.
class SubsetWindow final : public MappedWindow {
 public:
  SubsetWindow(std::shared_ptr<const MappedWorld> world, std::shared_ptr<MappedWindow> whole, std::vector<int> members)
      : MappedWindow(std::move(world)), whole_(std::move(whole)), members_(std::move(members)) {}
  std::byte* base(int local_rank) const override { return whole_->base(members_.at(static_cast<size_t>(local_rank))); }
  size_t arena_bytes() const override { return whole_->arena_bytes(); }
  std::byte* alloc(size_t bytes) override { return whole_->alloc(bytes); }
  void free(std::byte* block) override { whole_->free(block); }
  std::byte* alloc_region(size_t bytes) override { return whole_->alloc_region(bytes); }
  void retire_region(std::byte* block, size_t bytes) override { whole_->retire_region(block, bytes); }

 private:
  const std::shared_ptr<MappedWindow> whole_;
  const std::vector<int> members_;
};

RegionLayout layout_of(size_t members, MappedOptions options) {
  options.arena_bytes = 0;
  return RegionLayout(static_cast<int>(members), options);
}

}  // namespace

struct SubsetRegion::State {
  std::shared_ptr<MappedWindow> whole;
  std::vector<int> members;
  RegionLayout layout;
  size_t own;  // this rank among the members
  std::shared_ptr<RegionBlock> block;
  bool connected = false;
};

SubsetRegion::SubsetRegion(std::shared_ptr<Window> whole, std::vector<int> members, const MappedOptions& options) {
  auto mapped = std::dynamic_pointer_cast<MappedWindow>(std::move(whole));
  if (mapped == nullptr) throw ArgumentError("a subset needs the window of ranks that have mapped each other");
  const RegionLayout layout = layout_of(members.size(), options);
  const auto own = std::find(members.begin(), members.end(), mapped->local_rank());
  if (own == members.end()) {
    throw ArgumentError("local rank " + std::to_string(mapped->local_rank()) + " is not a member of this subset");
  }
  const auto index = static_cast<size_t>(own - members.begin());
  auto block = std::make_shared<RegionBlock>(mapped, layout.region_bytes);
  const int numa_node = mapped->world().header(mapped->local_rank()).numa_node;
  const Region& own_whole = *mapped->world().regions[static_cast<size_t>(mapped->local_rank())];
  const Region region(block->data(), layout.region_bytes, block, own_whole);
  region.initialize(static_cast<int>(index), numa_node);
  region.header().users.store(static_cast<uint32_t>(members.size()), std::memory_order_relaxed);
  state_ = std::make_unique<State>(State{std::move(mapped), std::move(members), layout, index, std::move(block)});
}

SubsetRegion::~SubsetRegion() {
  if (state_->connected) return;
  reinterpret_cast<RegionHeader*>(state_->block->data())->users.store(0);
}

uint64_t SubsetRegion::offset() const { return state_->whole->offset_of(state_->block->data(), 1); }

Endpoint SubsetRegion::connect(const std::vector<uint64_t>& offsets, std::vector<int> job_ranks) {
  const State& state = *state_;
  const MappedWorld& whole = state.whole->world();
  const size_t bytes = state.layout.region_bytes;
  if (offsets.size() != state.members.size()) {
    throw ArgumentError("a subset of " + std::to_string(state.members.size()) + " ranks got " +
                        std::to_string(offsets.size()) + " offsets");
  }
  MappedWorld world{static_cast<int>(state.own), state.layout, {}, std::move(job_ranks)};
  for (size_t i = 0; i < offsets.size(); ++i) {
    if (offsets[i] > state.whole->arena_bytes() || bytes > state.whole->arena_bytes() - offsets[i]) {
      throw TransportError("the region of a subset that " + state.whole->rank_name(state.members[i]) +
                           " tells of, at offset " + std::to_string(offsets[i]) + ", lies outside the arena of " +
                           std::to_string(state.whole->arena_bytes()) + " bytes");
    }
    const std::shared_ptr<Region>& of_whole = whole.regions.at(static_cast<size_t>(state.members[i]));
    std::shared_ptr<const void> owner = of_whole;
    if (i == state.own) owner = state.block;
    world.regions.push_back(
        std::make_shared<Region>(state.whole->base(state.members[i]) + offsets[i], bytes, std::move(owner), *of_whole));
  }
  if (whole.watch) world.watch = std::make_shared<SubsetWatch>(whole.watch, state.members);
  auto shared = complete_world(std::move(world));
  state_->connected = true;
  Endpoint endpoint;
  endpoint.transport = std::make_unique<MappedTransport>(whole.watch ? "shm" : "local", shared);
  endpoint.window = std::make_shared<SubsetWindow>(shared, state.whole, state.members);
  return endpoint;
}

}  // namespace dcoll
