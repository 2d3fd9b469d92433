// Which of two ways is faster for calls of a size, found out by going both in turns. By NCCL, or in memory that ranks
// have opened. In full, or encoded, where the cost model's two predictions are too close for it to be believed: between
// hosts that are pretended on one machine, for one, the links are copies by the cores that encode.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

namespace dcoll {

// Calls count by their time for each byte, for one trial is of sizes up to a factor of two apart.
class Trial {
 public:
  // How often each way is gone, for calls of about so many bytes: the shorter ones are, the more their times vary.
  static size_t calls_each_way(size_t bytes) {
    return std::clamp<size_t>((16 << 20) / std::max<size_t>(bytes, 1), 4, 16);
  }

  // each: of calls by one way, a multiple of 4.
  explicit Trial(size_t each = 4) : each_(each) {}

  bool second_next() const { return ((kSecond >> noted_ % 8) ^ (noted_ / 8)) % 2 == 1; }
  bool is_done() const { return is_clear_ || noted_ == 2 * each_; }
  // Now the ranks tell each other their medians: at the end, and once before it.
  bool is_to_weigh() const { return noted_ == kFirstLook || is_done(); }
  // By the medians of all ranks: done, where one way is so much slower that it need not be gone again.
  void weigh(double first, double second) { is_clear_ = std::max(first, second) > kClear * std::min(first, second); }
  void note(double us, size_t bytes) {
    us_per_byte_[second_next()].push_back(us / static_cast<double>(std::max<size_t>(bytes, 1)));
    ++noted_;
  }
  // Of this rank's calls by the first way, or by the second.
  double median_us_per_byte(bool second) const {
    auto sorted = us_per_byte_[second];
    std::ranges::sort(sorted);
    const size_t half = sorted.size() / 2;
    return (sorted[half - 1] + sorted[half]) / 2;
  }

 private:
  // By bits which of 8 calls go the second way; the next 8 go the other way round. Half of them, and also some, but not
  // all, of every second, third or fourth call, as the buckets of one step may be that many of different sizes.
  static constexpr unsigned kSecond = 0b0001'1110;
  static constexpr size_t kFirstLook = 8;
  static constexpr double kClear = 1.5;  // by chance two medians of four calls hardly differ that much
  const size_t each_;
  size_t noted_ = 0;
  bool is_clear_ = false;
  std::array<std::vector<double>, 2> us_per_byte_;
};

}  // namespace dcoll
