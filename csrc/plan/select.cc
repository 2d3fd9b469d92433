#include "plan/select.h"

#include <algorithm>
#include <cstdio>

namespace dcoll::plan {
namespace {

std::string in_words(uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1024 && unit < 3; ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, "%.4g %s", value, kUnits[unit]);
  return text;
}

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

}  // namespace

Choice select(Collective collective, uint64_t bytes, const Topology& topology, uint64_t slice_bytes) {
  Choice choice{};
  const bool too_many = topology.num_ranks > kMaxDirectRanks;
  for (const Algorithm& algorithm : algorithms()) {
    if (algorithm.collective != collective || (too_many && algorithm.name == "direct")) continue;
    choice.candidates.push_back({&algorithm, 0.0});
  }
  for (Candidate& candidate : choice.candidates) {
    candidate.predicted_us =
        predict_us(build_all(*candidate.algorithm, topology.num_ranks), bytes, topology, slice_bytes);
  }
  // Stable: at equal times (0 bytes, one rank) the registry's order decides, the same on every rank.
  std::stable_sort(choice.candidates.begin(), choice.candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.predicted_us < b.predicted_us; });
  choice.algorithm = choice.candidates[0].algorithm;
  choice.why = explain(choice.candidates, bytes, topology.num_ranks);
  return choice;
}

}  // namespace dcoll::plan
