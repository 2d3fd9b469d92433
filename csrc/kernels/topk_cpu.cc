// Exact selection in one pass over memory. A sample gives a magnitude that somewhat more than k elements reach. While
// the feedback is added up, elements that reach it are listed; the k-th greatest is found among these alone, digit by
// digit. Where the sample has misled (too few, or too many to list, as of equal values), it is found among all.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/dispatch.h"
#include "kernels/float_state.h"
#include "kernels/reduce.h"
#include "kernels/topk.h"
#include "kernels/topk_message.h"

namespace dcoll::kernels {
namespace {

using namespace top;

constexpr size_t kPortion = 2048;     // added up and looked at while in the first cache
constexpr size_t kSlack = 16;         // find_beyond writes whole vectors
constexpr size_t kSampleFrom = 4096;  // fewer elements are all looked at
constexpr size_t kSampleRun = 16;     // sampled side by side: a cache line

const char* bytes(const float* at) { return reinterpret_cast<const char*>(at); }

class Selection {
 public:
  Selection(const float* src, size_t count, size_t k, const Feedback& feedback)
      : src_(src), values_(feedback.error != nullptr ? feedback.error : src), count_(count), k_(k), f_(feedback) {}

  size_t write(void* message) {
    const bool all_listed = add_up(guess());
    if (count_ > 0) std::memset(message, 0, top_bytes(count_, k_));
    if (k_ == 0) return 0;
    const Threshold threshold = exact(all_listed);
    Parts parts(message, count_, k_);
    size_t ties = threshold.ties;
    const auto take = [&](const uint32_t* numbers, size_t n) {
      for (size_t i = 0; i < n; ++i) {
        const uint32_t number = numbers[i], bits = magnitude_bits(values_[number]);
        if (bits < threshold.bits || (bits == threshold.bits && ties == 0)) continue;
        if (bits == threshold.bits) --ties;
        put(parts, number);
      }
    };
    if (all_listed) {
      take(found_.get(), listed_);
    } else {
      found_ = std::make_unique_for_overwrite<uint32_t[]>(kPortion + kSlack);
      in_portions(
          [&](size_t at, size_t n) { take(found_.get(), find(found_.get(), at, n, std::max(threshold.bits, 1u))); });
    }
    if (threshold.bits >= kInfinity) drop_infinities();
    return sent_;
  }

 private:
  template <class Work>
  void in_portions(const Work& work) const {
    for (size_t at = 0; at < count_; at += kPortion) work(at, std::min(kPortion, count_ - at));
  }

  size_t find(uint32_t* found, size_t at, size_t n, uint32_t least) const {
    return active_kernels().find_beyond(found, bytes(values_ + at), n, least, static_cast<uint32_t>(at));
  }

  // A magnitude that about as many elements reach as are asked for, and rather more. Four standard deviations: one
  // sample in some ten thousand misleads.
  uint32_t guess() {
    if (count_ < kSampleFrom || k_ == 0 || k_ == count_) {
      room_ = 0;
      return 0;
    }
    const size_t runs = std::clamp<size_t>(count_ / 2048, 64, 512), stride = (count_ - kSampleRun) / (runs - 1);
    const size_t size = runs * kSampleRun;
    std::vector<uint32_t> sample(size);
    for (size_t i = 0; i < size; ++i) {
      const size_t at = i / kSampleRun * stride + i % kSampleRun;
      float x = src_[at];
      if (f_.velocity != nullptr) x += f_.momentum * f_.velocity[at];
      if (f_.error != nullptr) x += f_.error[at];
      sample[i] = magnitude_bits(x);
    }
    const double share = static_cast<double>(size) * static_cast<double>(k_) / static_cast<double>(count_);
    const auto rank = static_cast<size_t>(share + 4 * std::sqrt(share) + 1);
    const bool few = rank >= size;
    room_ = few ? count_ : std::min(count_, 2 * (count_ / size + 1) * rank + kPortion);
    return few ? 1 : std::max(1u, kth_greatest(size, rank, [&](size_t i) { return sample[i]; }).bits);
  }

  // Brings the feedback up to date and lists elements from `least` on. Returns whether those that are asked for are
  // among them.
  bool add_up(uint32_t least) {
    if (room_ > 0) found_ = std::make_unique_for_overwrite<uint32_t[]>(room_ + kPortion + kSlack);
    bool lists = room_ > 0;
    in_portions([&](size_t at, size_t n) {
      const float* operand = src_ + at;
      if (f_.velocity != nullptr) {
        float* const velocity = f_.velocity + at;
        scale(velocity, velocity, n, DType::kFloat32, f_.momentum);
        reduce2(velocity, velocity, operand, n, DType::kFloat32, ReduceOp::kSum);
        operand = velocity;
      }
      if (f_.error != nullptr) reduce2(f_.error + at, f_.error + at, operand, n, DType::kFloat32, ReduceOp::kSum);
      if (!lists) return;
      listed_ += find(found_.get() + listed_, at, n, least);
      lists = listed_ <= room_;
    });
    return lists && (listed_ >= k_ || least == 1);
  }

  // Of the elements that are sent; zeros, of which there are more than are asked for, are not.
  Threshold exact(bool all_listed) const {
    if (all_listed && listed_ <= k_) return {0, 0};
    if (!all_listed) {
      const Threshold found = kth_greatest(count_, k_, [&](size_t i) { return magnitude_bits(values_[i]); });
      return found.bits == 0 ? Threshold{0, 0} : found;
    }
    std::vector<uint32_t> keys(listed_);
    for (size_t i = 0; i < listed_; ++i) keys[i] = magnitude_bits(values_[found_[i]]);
    return kth_greatest(listed_, k_, [&](size_t i) { return keys[i]; });
  }

  void put(Parts& parts, uint32_t number) {
    parts.put(number, values_[number], sent_);
    if (f_.error != nullptr) f_.error[number] = 0;
    if (f_.velocity != nullptr) f_.velocity[number] = 0;  // "momentum factor masking"
  }

  void drop_infinities() const {
    for (float* const kept : {f_.error, f_.velocity}) {
      for (size_t i = 0; kept != nullptr && i < count_; ++i) {
        if (magnitude_bits(kept[i]) >= kInfinity) kept[i] = 0;
      }
    }
  }

  const float *src_, *values_;
  size_t count_, k_;
  const Feedback& f_;
  std::unique_ptr<uint32_t[]> found_;  // numbers of elements, ascending
  size_t room_ = 0, listed_ = 0, sent_ = 0;
};

}  // namespace

size_t top_count(size_t count, float ratio) {
  const double wanted = std::round(static_cast<double>(ratio) * static_cast<double>(count));
  return std::min(count, std::max<size_t>(count > 0, static_cast<size_t>(wanted)));
}

size_t top_bytes(size_t count, size_t k) { return 4 * blocks_of(count) + (2 * k + 3) / 4 * 4 + 4 * k; }

size_t encode_top(void* message, const float* src, size_t count, size_t k, const Feedback& feedback) {
  const KeepSubnormals keep;
  return Selection(src, count, k, feedback).write(message);
}

size_t sum_top(float* dst, std::span<const void* const> messages, size_t count, size_t k, double factor) {
  const KeepSubnormals keep;
  std::vector<Parts> parts;
  for (const void* const message : messages) {
    Parts& p = parts.emplace_back(const_cast<void*>(message), count, k);
    uint64_t total = 0;
    for (size_t block = 0; block < blocks_of(count); ++block) total += load<uint32_t>(p.counts, block);
    if (total > k) return parts.size() - 1;
  }
  // A power of two leaves the same bits whether it multiplies values or their sum, but for subnormal ones.
  int exponent;
  const bool each = std::frexp(factor, &exponent) == 0.5;
  const auto of_each = static_cast<float>(each ? factor : 1.0);
  for (size_t block = 0; block < blocks_of(count); ++block) {
    const size_t begin = block * kBlock, length = std::min(kBlock, count - begin);
    std::memset(dst + begin, 0, length * sizeof(float));
    for (size_t m = 0; m < parts.size(); ++m) {
      Parts& p = parts[m];
      const auto here = load<uint32_t>(p.counts, block);
      for (uint32_t i = 0; i < here; ++i) {
        const auto place = load<uint16_t>(p.places, i);
        if (place >= length) return m;
        dst[begin + place] += load<float>(p.values, i) * of_each;
      }
      p.places += here * sizeof(uint16_t);
      p.values += here * sizeof(float);
    }
    if (!each) scale(dst + begin, dst + begin, length, DType::kFloat32, factor);
  }
  return parts.size();
}

}  // namespace dcoll::kernels
