// Which of two ways is faster for calls of a size, found out by going both in turns. By NCCL, or in memory that ranks
// have opened. In full, or encoded, where the cost model's two predictions are too close for it to be believed: between
// hosts that are pretended on one machine, for one, the links are copies by the cores that encode.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

namespace dcoll {

class Trial {
 public:
  bool second_next() const { return noted_ % 2 == 1; }
  bool is_done() const { return noted_ == 2 * kEach; }
  void note(double us) { us_[noted_ % 2][noted_ / 2] = us, ++noted_; }
  // Of this rank's calls by the first way, or by the second.
  double median_us(bool second) const {
    auto sorted = us_[second ? 1 : 0];
    std::ranges::sort(sorted);
    return (sorted[kEach / 2 - 1] + sorted[kEach / 2]) / 2;
  }

 private:
  static constexpr size_t kEach = 4;
  std::array<std::array<double, kEach>, 2> us_{};
  size_t noted_ = 0;
};

}  // namespace dcoll
