#include "plan/select.h"

#include <algorithm>
#include <cstdio>

#include "plan/agreement.h"
#include "plan/describe.h"

namespace dcoll::plan {
namespace {

std::string explain(const std::vector<Candidate>& candidates, uint64_t bytes, uint32_t n) {
  char text[96];
  std::snprintf(text, sizeof text, ": %.1f us predicted for %s on %u ranks", candidates[0].predicted_us,
                in_words(bytes).c_str(), n);
  std::string why = std::string(candidates[0].algorithm->name) + text;
  for (size_t i = 1; i < candidates.size(); ++i) {
    std::snprintf(text, sizeof text, " %.1f us", candidates[i].predicted_us);
    why += (i == 1 ? "; " : ", ") + std::string(candidates[i].algorithm->name) + text;
  }
  return why;
}

bool has_several_nodes(const Topology& topology) {
  return std::any_of(topology.node_of_rank.begin(), topology.node_of_rank.end(),
                     [&](uint32_t node) { return node != topology.node_of_rank[0]; });
}

// How many rounds the engine has under way on each channel: between nodes as many as there are channels for.
uint32_t lanes_of(const std::vector<Schedule>& schedules, const Topology& topology) {
  const size_t channels = std::max<size_t>(1, schedules[0].channels.size());
  if (!has_several_nodes(topology)) return 1;
  return std::max<uint32_t>(1, static_cast<uint32_t>(kMaxScheduleChannels / channels));
}

// A shorter slice must be better by this much to be taken: the model is no more exact.
constexpr double kWorthwhile = 0.97;
constexpr uint64_t kShortestSlice = 8 << 10;

Candidate predict(const Algorithm& algorithm, uint64_t bytes, const Topology& topology, uint64_t slice_bytes,
                  double before_us) {
  const std::vector<Schedule> schedules = build_all(algorithm, topology.num_ranks);
  const uint32_t lanes = lanes_of(schedules, topology);
  Candidate best{&algorithm, predict_us(schedules, bytes, topology, slice_bytes, lanes, before_us), slice_bytes};
  if (lanes == 1 || topology.num_ranks > kMaxTriedRanks) return best;
  for (uint64_t shorter = slice_bytes / 2; shorter >= std::max(kShortestSlice, slice_bytes / 16); shorter /= 2) {
    const double time_us = predict_us(schedules, bytes, topology, shorter, lanes, before_us);
    if (time_us < kWorthwhile * best.predicted_us) best = {&algorithm, time_us, shorter};
  }
  return best;
}

// Between nodes the ring is preferred where it is predicted to take at most this much of the fastest's time: every rank
// has one sender and one receiver, and a slice goes on while it is in the cache. Measured on 2 hosts of 10 Gbit/s from
// 16 MiB on: ring 0.65 to 0.8 of the time of "direct", predicted alike, equal up to 4 MiB; on 4 hosts of 1 Gbit/s they
// are equal.
constexpr double kRingMayTake = 1.05;
constexpr uint64_t kRingFromBytes = uint64_t{4} << 20;

void prefer_ring(std::vector<Candidate>& candidates, uint64_t bytes, const Topology& topology) {
  if (!has_several_nodes(topology) || bytes < kRingFromBytes) return;
  const auto ring = std::find_if(candidates.begin(), candidates.end(),
                                 [](const Candidate& one) { return one.algorithm->family == Family::kRing; });
  if (ring == candidates.end() || ring->predicted_us > kRingMayTake * candidates[0].predicted_us) return;
  std::rotate(candidates.begin(), ring, ring + 1);
}

bool rides(const Algorithm& algorithm, uint64_t bytes, const Topology& topology, uint64_t slice_bytes) {
  return algorithm.collective == Collective::kAllReduce && algorithm.family == Family::kDirect &&
         rides_on_agreement(bytes, topology.num_ranks, slice_bytes);
}

Choice choose(Collective collective, uint64_t bytes, const Topology& topology, uint64_t slice_bytes, bool agreed) {
  Choice choice{};
  const double before_us = agreed ? 0.0 : agreement_us(topology, 0);
  const bool too_many = topology.num_ranks > kMaxDirectRanks;
  for (const Algorithm& algorithm : algorithms()) {
    if (algorithm.collective != collective || (too_many && algorithm.family == Family::kDirect)) continue;
    if (!agreed && rides(algorithm, bytes, topology, slice_bytes)) {
      choice.candidates.push_back({&algorithm, agreement_us(topology, bytes), slice_bytes});
    } else {
      choice.candidates.push_back(predict(algorithm, bytes, topology, slice_bytes, before_us));
    }
  }
  // Stable: at equal times (0 bytes, one rank) the registry's order decides, the same on every rank.
  std::stable_sort(choice.candidates.begin(), choice.candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.predicted_us < b.predicted_us; });
  if (collective == Collective::kAllReduce) prefer_ring(choice.candidates, bytes, topology);
  choice.algorithm = choice.candidates[0].algorithm;
  choice.slice_bytes = choice.candidates[0].slice_bytes;
  choice.why = explain(choice.candidates, bytes, topology.num_ranks);
  return choice;
}

}  // namespace

Choice select(Collective collective, uint64_t bytes, const Topology& topology, uint64_t slice_bytes) {
  return choose(collective, bytes, topology, slice_bytes, !has_several_nodes(topology));
}

Choice select_part(Collective collective, uint64_t bytes, const Topology& topology, uint64_t slice_bytes) {
  return choose(collective, bytes, topology, slice_bytes, true);
}

}  // namespace dcoll::plan
