#include "engine/collective/line_up.h"

#include <algorithm>
#include <utility>

namespace dcoll {
namespace {

// The fewest calls that a rank refused: so many were refused by all.
uint32_t fewest_refused(std::span<const Standing> ranks) {
  uint32_t fewest = UINT32_MAX;
  for (const Standing& rank : ranks) {
    if (!rank.joined) fewest = std::min(fewest, rank.refused);
  }
  return fewest;
}

bool is_behind(const Standing& rank, std::span<const Standing> ranks) {
  return std::ranges::any_of(ranks, [&](const Standing& other) {
    return !other.joined && other.call != rank.call && other.had_called(rank.call);
  });
}

std::vector<bool> find_behind(std::span<const Standing> ranks) {
  std::vector<bool> behind;
  const uint32_t fewest = fewest_refused(ranks);
  const auto refused_more = [&](const Standing& rank) { return !rank.joined && rank.refused > fewest; };
  if (std::ranges::any_of(ranks, refused_more)) {
    for (const Standing& rank : ranks) behind.push_back(!refused_more(rank));
    return behind;
  }
  bool all = true;
  for (const Standing& rank : ranks) {
    behind.push_back(is_behind(rank, ranks));
    all = all && (rank.joined || behind.back());
  }
  if (!all) return behind;
  // Each has called what another one calls now: a shift of a repeated pattern, which any rank may wait out.
  const auto first = std::ranges::find(ranks, false, &Standing::joined);
  for (size_t rank = 0; rank < ranks.size(); ++rank) behind[rank] = ranks[rank].call != first->call;
  return behind;
}

}  // namespace

bool Standing::had_called(uint64_t other) const {
  const std::span<const uint64_t> before(failed.data(), std::min<size_t>(num_failed, failed.size()));
  return std::ranges::find(before, other) != before.end();
}

std::vector<Verdict> line_up(std::span<const Standing> ranks) {
  std::vector<Verdict> verdicts(ranks.size(), Verdict::kFails);
  if (std::ranges::any_of(ranks, &Standing::gives_way)) {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (ranks[rank].gives_way) verdicts[rank] = Verdict::kGivesWay;
    }
    return verdicts;
  }
  const std::vector<bool> behind = find_behind(ranks);
  if (std::ranges::find(behind, true) == behind.end()) return verdicts;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (!behind[rank]) verdicts[rank] = Verdict::kTryAgain;
  }
  return verdicts;
}

void OutOfStep::refuse(uint64_t number, std::string why) {
  constexpr size_t kMost = 1000;  // of a program that never makes the call it is refused
  if (refused_.size() < kMost) refused_.push_back({number, std::move(why)});
}

Standing OutOfStep::standing(uint64_t number, uint64_t call) {
  // Where an operation between was one of all ranks, what came before it does not count.
  std::erase_if(refused_, [&](const Refusal& refusal) { return refusal.number != number; });
  if (number > failed_at_ + 1) failed_.clear();
  Standing standing{.call = call, .refused = static_cast<uint32_t>(refused_.size())};
  standing.num_failed = static_cast<uint32_t>(failed_.size());
  std::ranges::copy(failed_, standing.failed.begin());
  return standing;
}

std::string OutOfStep::reason_of(uint64_t number) const {
  const auto first = std::ranges::find(refused_, number, &Refusal::number);
  return first == refused_.end() ? std::string() : first->why;
}

bool OutOfStep::settle(uint64_t number, std::span<const Standing> ranks, std::span<const Verdict> verdicts,
                       size_t self) {
  const bool made_up = std::ranges::find(verdicts, Verdict::kTryAgain) != verdicts.end();
  const uint32_t by_all = fewest_refused(ranks);
  refused_.erase(refused_.begin(), refused_.begin() + std::min<ptrdiff_t>(by_all, std::ssize(refused_)));
  if (verdicts[self] == Verdict::kTryAgain && !refused_.empty()) refused_.pop_front();
  failed_at_ = number;
  if (verdicts[self] != Verdict::kFails || made_up) return !made_up;
  failed_.push_back(ranks[self].call);
  if (failed_.size() > Standing::kMostFailed) failed_.pop_front();
  return true;
}

}  // namespace dcoll
