// Lists of ranks, in messages too, and what of a text has room.
#pragma once

#include <algorithm>
#include <map>
#include <numeric>
#include <string>
#include <vector>

namespace dcoll {

// "rank 3", "ranks 0, 2, 5".
inline std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

// 0 to n - 1.
inline std::vector<int> ranks_below(size_t n) {
  std::vector<int> ranks(n);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// By rank, of what each says of its place: the number of that place, in the order of their lowest ranks.
template <typename Place>
std::vector<int> numbered(const std::vector<Place>& places) {
  std::map<Place, int> numbers;
  std::vector<int> found;
  for (const Place& place : places) {
    found.push_back(numbers.try_emplace(place, static_cast<int>(numbers.size())).first->second);
  }
  return found;
}

// In ascending order, each once.
inline void sort_once(std::vector<int>& ranks) {
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
}

// At most `most` bytes of the text, never cutting a UTF-8 character (it becomes a Python string).
inline size_t whole_characters(const std::string& text, size_t most) {
  if (text.size() <= most) return text.size();
  size_t length = most;
  while (length > 0 && (static_cast<unsigned char>(text[length]) & 0xc0) == 0x80) --length;
  return length;
}

}  // namespace dcoll
