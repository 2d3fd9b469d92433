#include "engine/watch/stall.h"

#include <algorithm>

#include "base/ranks_text.h"

namespace dcoll {

std::vector<int> culprits(int own, std::vector<int> waits_for, const std::vector<StallNote>& notes,
                          Clock::time_point since) {
  std::vector<int> blamed = waits_for, waiting{own};
  for (const StallNote& note : notes) {
    if (note.heard < since) continue;
    waiting.push_back(note.rank);
    blamed.insert(blamed.end(), note.waits_for.begin(), note.waits_for.end());
  }
  std::erase_if(blamed, [&](int rank) { return std::find(waiting.begin(), waiting.end(), rank) != waiting.end(); });
  if (blamed.empty()) blamed = std::move(waits_for);
  sort_once(blamed);
  return blamed;
}

}  // namespace dcoll
