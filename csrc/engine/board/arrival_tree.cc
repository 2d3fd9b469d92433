#include "engine/board/arrival_tree.h"

#include <algorithm>

namespace dcoll {
namespace {

using Summary = ArrivalGroup::Summary;

void merge(Summary& into, const Summary& other) {
  into.least = std::min(into.least, other.least);
  into.greatest = std::max(into.greatest, other.greatest);
  into.mapped += other.mapped;
}

}  // namespace

ArrivalTree::ArrivalTree(Window& window) : window_(window) {
  const auto& groups = window.groups();
  for (size_t g = 0; g < groups.size(); ++g) {
    groups_.push_back(&window.group(static_cast<int>(g)));
    if (std::find(groups[g].begin(), groups[g].end(), window.local_rank()) == groups[g].end()) continue;
    members_ = &groups[g];
    own_ = groups_.back();
  }
}

int ArrivalTree::arrive(uint64_t ticket) {
  const size_t parity = ticket % 2;
  const uint64_t round = (ticket + 1) / 2;  // posts of this parity so far
  const uint64_t arrived = own_->arrived[parity].fetch_add(1, std::memory_order_acq_rel) + 1;
  if (arrived > round * members_->size()) [[unlikely]]
    return keeper();
  if (arrived < round * members_->size()) return -1;
  own_->summary[parity] = summarize_members(ticket);
  const uint64_t groups = groups_.front()->groups_arrived[parity].fetch_add(1, std::memory_order_acq_rel) + 1;
  if (groups > round * groups_.size()) [[unlikely]]
    return window_.groups().front().front();
  if (groups < round * groups_.size()) return -1;
  Summary all;
  for (const ArrivalGroup* group : groups_) merge(all, group->summary[parity]);
  for (ArrivalGroup* group : groups_) group->outcome[parity] = all;
  window_.release_groups(ticket);
  return -1;
}

Summary ArrivalTree::summarize_members(uint64_t ticket) {
  Summary summary;
  for (const int rank : *members_) {
    const BoardEntry::Post& post = window_.board(rank).record[ticket % 2].post;
    merge(summary, {post.fingerprint, post.fingerprint, post.mapped()});
  }
  return summary;
}

}  // namespace dcoll
