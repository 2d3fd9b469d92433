// Ranks in messages.
#pragma once

#include <string>
#include <vector>

namespace dcoll {

// "rank 3", "ranks 0, 2, 5".
inline std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

}  // namespace dcoll
