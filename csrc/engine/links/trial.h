// Whether calls of a size are faster encoded, found out by doing both in turns: where the cost model's two predictions
// are too close for it to be believed. Between hosts that are pretended on one machine, for one, the links are copies
// by the cores that encode.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

namespace dcoll {

class Trial {
 public:
  bool encodes_next() const { return noted_ % 2 == 1; }
  bool is_done() const { return noted_ == 2 * kEach; }
  void note(double us) { us_[noted_ % 2][noted_ / 2] = us, ++noted_; }
  // Of this rank's calls, in full or encoded.
  double median_us(bool encoded) const {
    auto sorted = us_[encoded ? 1 : 0];
    std::ranges::sort(sorted);
    return (sorted[kEach / 2 - 1] + sorted[kEach / 2]) / 2;
  }

 private:
  static constexpr size_t kEach = 4;
  std::array<std::array<double, kEach>, 2> us_{};
  size_t noted_ = 0;
};

}  // namespace dcoll
