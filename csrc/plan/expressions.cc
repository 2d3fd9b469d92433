#include <algorithm>

#include "plan/verify_internal.h"

namespace dcoll::plan::internal {

Expressions::Expressions(uint32_t ranks, uint32_t chunks, uint32_t rounds)
    : ranks_(ranks), chunks_(chunks), rounds_(rounds) {
  nodes_.reserve(static_cast<size_t>(ranks) * chunks * rounds * 2);
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    for (uint32_t subject = 0; subject < chunks * rounds; ++subject) {
      nodes_.push_back({.a = rank, .b = kNothing, .leaves = 1, .subject = subject, .final = false});
    }
  }
}

Expressions::Id Expressions::leaf(uint32_t rank, uint32_t chunk, uint32_t round) const {
  return (rank * chunks_ + chunk) * rounds_ + round;
}

Expressions::Id Expressions::intern(Node node) {
  const uint64_t key = (static_cast<uint64_t>(node.a) << 32) | node.b;
  const auto [at, inserted] = ids_.try_emplace(key, static_cast<Id>(nodes_.size()));
  if (inserted) nodes_.push_back(node);
  return at->second;
}

Expressions::Id Expressions::combine(Id a, Id b) {
  const Node &x = nodes_[a], &y = nodes_[b];
  if (x.final || y.final) throw Violation("reduces further what was finalized already");
  if (x.subject != y.subject) throw Violation("combines " + describe(a) + " with " + describe(b));
  const uint32_t leaves = x.leaves + y.leaves;
  if (leaves > ranks_) throw Violation("takes a contribution twice: " + describe(a) + " and " + describe(b));
  return intern({.a = a, .b = b, .leaves = leaves, .subject = x.subject, .final = false});
}

Expressions::Id Expressions::finalize(Id a) {
  const Node& node = nodes_[a];
  if (node.final) throw Violation("finalizes what was finalized already");
  if (node.leaves < ranks_) throw Violation("finalizes before all contributions are in: " + describe(a));
  // kNothing as second operand: no sum has it. A node already known was found complete when it was made.
  const uint64_t key = (static_cast<uint64_t>(a) << 32) | kNothing;
  if (const auto known = ids_.find(key); known != ids_.end()) return known->second;
  std::vector<uint32_t> ranks = contributors(a, ranks_);
  std::sort(ranks.begin(), ranks.end());
  if (std::adjacent_find(ranks.begin(), ranks.end()) != ranks.end()) {
    throw Violation("takes a contribution twice: " + describe(a));
  }
  return intern({.a = a, .b = kNothing, .leaves = node.leaves, .subject = node.subject, .final = true});
}

std::vector<uint32_t> Expressions::contributors(Id id, size_t limit) const {
  std::vector<uint32_t> ranks;
  std::vector<Id> pending{id};
  while (!pending.empty() && ranks.size() < limit) {
    const Node& node = nodes_[pending.back()];
    pending.pop_back();
    if (node.final) {
      pending.push_back(node.a);
    } else if (node.b == kNothing) {
      ranks.push_back(node.a);
    } else {
      pending.push_back(node.b);
      pending.push_back(node.a);
    }
  }
  return ranks;
}

Expressions::Id Expressions::rank_order_sum(uint32_t chunk, uint32_t round) {
  Id sum = leaf(0, chunk, round);
  for (uint32_t rank = 1; rank < ranks_; ++rank) sum = combine(sum, leaf(rank, chunk, round));
  return finalize(sum);
}

std::string Expressions::describe(Id id) const {
  constexpr size_t kShown = 12;
  const Node& node = nodes_[id];
  std::string text;
  for (const uint32_t rank : contributors(id, kShown)) text += (text.empty() ? "x" : "+x") + std::to_string(rank);
  if (node.leaves > kShown) text += "+...";
  return "[" + text + " (" + std::to_string(node.leaves) + " of " + std::to_string(ranks_) + "), chunk " +
         std::to_string(node.subject / rounds_) + " round " + std::to_string(node.subject % rounds_) + "]";
}

}  // namespace dcoll::plan::internal
