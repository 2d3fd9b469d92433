#include "engine/levels/hierarchy.h"

#include <algorithm>
#include <bit>
#include <new>

#include "base/types.h"
#include "plan/algorithms.h"

namespace dcoll {
namespace {

constexpr size_t kSharedBytes = round_up(sizeof(NodeShared), 4096);

size_t piece_bytes_for(const NodeMap& map, size_t slice_bytes, bool little_memory) {
  const auto carriers = static_cast<uint32_t>(map.carriers);
  return round_up(plan::most_piece_bytes(static_cast<uint32_t>(map.num_nodes()), carriers, slice_bytes, little_memory),
                  carriers * Hierarchy::kLine);
}

}  // namespace

Hierarchy::Hierarchy(Messages& transport, std::shared_ptr<Window> window, NodeMap map, plan::Topology links,
                     size_t slice_bytes, bool little_memory)
    : transport_(transport),
      window_(std::move(window)),
      map_(std::move(map)),
      links_(std::move(links)),
      slice_bytes_(slice_bytes),
      little_memory_(little_memory),
      piece_bytes_(piece_bytes_for(map_, slice_bytes, little_memory)),
      result_bytes_(round_up(piece_bytes_ / map_.carriers + kLine, kLine)),
      small_bytes_(plan::riding_bytes(static_cast<uint32_t>(map_.num_nodes()), slice_bytes)),
      board_(*window_),
      memory_(
          Memory::mapped(window_, kSharedBytes + 2 * plan::kSmallSlotBytes + kPieces * (piece_bytes_ + result_bytes_))),
      blocks_(map_.local_size()),
      leaders_(transport, map_.carriers_of(0), map_.node) {
  for (int node = 0; node < map_.num_nodes(); ++node) {
    for (const int rank : map_.ranks[node]) links_.node_of_rank[rank] = static_cast<uint32_t>(node);
  }
  new (memory_->data()) NodeShared();
  blocks_[map_.local_rank] = memory_->data();
  tell_missing({});
  first_post_ = board_.post({.offset_in = window_->offset_of(memory_->data(), memory_->bytes())});
}

void Hierarchy::learn() {
  for (int local = 0; local < local_size(); ++local) {
    blocks_[local] = board_.place(local, board_.at(local, first_post_).offset_in, memory_->bytes());
  }
  connected_ = true;
}

std::byte* Hierarchy::small_slot(int local, uint64_t ticket) const {
  return blocks_[local] + kSharedBytes + ticket % 2 * plan::kSmallSlotBytes;
}

std::byte* Hierarchy::operand_slot(int local, uint64_t piece) const {
  return blocks_[local] + kSharedBytes + 2 * plan::kSmallSlotBytes + piece % kPieces * piece_bytes_;
}

std::byte* Hierarchy::result_slot(int local, uint64_t piece) const {
  return operand_slot(local, 0) + kPieces * piece_bytes_ + piece % kPieces * result_bytes_;
}

std::unique_ptr<GroupTransport> Hierarchy::carriers(int bank, int channels) {
  return std::make_unique<GroupTransport>(transport_, map_.carriers_of(local_rank()), map_.node, bank * channels);
}

int Hierarchy::carriers_for(size_t bytes) const {
  return static_cast<int>(plan::carriers_for(bytes, static_cast<uint32_t>(map_.carriers), links_.shared_cores));
}

// A slice, of fewer carriers a larger one, must find room in its result slot.
size_t Hierarchy::piece_bytes(size_t bytes, int carriers, bool encoded) const {
  const size_t wanted = encoded ? piece_bytes_ : plan::piece_bytes(bytes, piece_bytes_, links_.network, slice_bytes_);
  return std::min(wanted, carriers * (result_bytes_ - kLine)) / kLine * kLine;
}

// This node's of the schedules of all; and the most channels that one of them has.
std::shared_ptr<const plan::Schedule> Hierarchy::build(const plan::Algorithm& algorithm, int& channels) const {
  std::vector<plan::Schedule> all = plan::build_all(algorithm, static_cast<uint32_t>(map_.num_nodes()));
  for (const plan::Schedule& one : all) channels = std::max(channels, static_cast<int>(one.channels.size()));
  return std::make_shared<const plan::Schedule>(std::move(all[map_.node]));
}

// Sizes are rounded up to a power of two: the model is asked once for each, and all ranks ask for the same.
const Hierarchy::Between& Hierarchy::between(size_t bytes, int carriers) {
  const size_t rounded = std::bit_ceil(std::max<size_t>(bytes, 1));
  Between& known = between_of_[{carriers, rounded}];
  if (known.schedule != nullptr) return known;
  const auto nodes = static_cast<uint32_t>(map_.num_nodes());
  const plan::Choice choice =
      plan::select_between(rounded, links_, nodes, static_cast<uint32_t>(carriers), slice_bytes_);
  known.schedule = build(*choice.algorithm, known.channels);
  return known;
}

const Hierarchy::Encoded& Hierarchy::encoded() {
  if (encoded_.to_owners != nullptr) return encoded_;
  const auto of = [this](plan::Collective collective, plan::Family family) {
    return build(plan::algorithm_of(collective, family), encoded_.channels);
  };
  encoded_.to_owners = of(plan::Collective::kAllToAll, plan::Family::kPairwise);
  encoded_.to_everybody = of(plan::Collective::kAllGather, plan::Family::kRing);
  return encoded_;
}

void Hierarchy::use(const plan::Constants& constants) {
  static_cast<plan::Constants&>(links_) = constants;
  between_of_.clear();
}

void Hierarchy::tell_missing(const std::vector<int>& ranks) const {
  auto& told = own().missing.ranks;
  for (size_t i = 0; i < told.size(); ++i) {
    told[i].store(i < ranks.size() ? ranks[i] : -1, std::memory_order_relaxed);
  }
}

void Hierarchy::add_missing(int local, std::vector<int>& ranks) const {
  bool told = false;
  for (const auto& entry : shared(local).missing.ranks) {
    const int32_t rank = entry.load(std::memory_order_relaxed);
    if (rank < 0 || rank >= transport_.size()) break;
    ranks.push_back(rank);
    told = true;
  }
  if (!told) ranks.push_back(map_.rank_of(local));
}

void Hierarchy::add_absent(uint64_t ticket, std::vector<int>& ranks) const {
  for (int local = 0; local < map_.local_size(); ++local) {
    if (!board_.seen(local, ticket)) ranks.push_back(map_.rank_of(local));
  }
}

}  // namespace dcoll
