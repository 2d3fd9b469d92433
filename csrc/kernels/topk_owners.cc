#include "kernels/topk_owners.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <utility>

#include "kernels/float_state.h"
#include "kernels/topk_message.h"

namespace dcoll::kernels {
namespace {

using namespace top;

struct Element {
  size_t number;
  float value;
};

// Adds up a block of the messages: its elements, each once, ascending.
class BlockSum {
 public:
  // False: a place is beyond the block, of `length` elements.
  bool add(Parts& parts, size_t block, size_t length) {
    const auto here = load<uint32_t>(parts.counts, block);
    for (uint32_t i = 0; i < here; ++i) {
      const auto place = load<uint16_t>(parts.places, i);
      if (place >= length) return false;
      uint64_t& word = taken_[place / 64];
      const uint64_t bit = uint64_t{1} << place % 64;
      const float value = load<float>(parts.values, i);
      sum_[place] = (word & bit) != 0 ? sum_[place] + value : value;
      word |= bit;
    }
    parts.places += here * sizeof(uint16_t);
    parts.values += here * sizeof(float);
    return true;
  }

  // Zeros are left out.
  void move_to(std::vector<Element>& all, size_t begin) {
    for (size_t w = 0; w < taken_.size(); ++w) {
      for (uint64_t bits = std::exchange(taken_[w], 0); bits != 0; bits &= bits - 1) {
        const size_t place = w * 64 + static_cast<size_t>(std::countr_zero(bits));
        if (magnitude_bits(sum_[place]) != 0) all.push_back({begin + place, sum_[place]});
      }
    }
  }

 private:
  std::unique_ptr<float[]> sum_ = std::make_unique_for_overwrite<float[]>(kBlock);
  std::vector<uint64_t> taken_ = std::vector<uint64_t>(kBlock / 64);
};

}  // namespace

// The multiplication spreads neighbours, its upper half is even for any number of owners (D. Lemire, "Fast random
// integer generation in an interval", 2019).
size_t owner_of(size_t element, size_t owners) {
  const auto block = static_cast<uint32_t>(element / kOwnedBlock);
  uint32_t x = block * 0x9e3779b9u;
  x = (x ^ (x >> 16)) * 0x846ca68bu;
  return static_cast<uint64_t>(x ^ (x >> 16)) * owners >> 32;
}

SplitTop split_top(const void* message, size_t count, size_t k, size_t owners) {
  Parts from(const_cast<void*>(message), count, k);
  std::vector<std::vector<Element>> dealt(owners);
  for (size_t block = 0, i = 0; block < blocks_of(count); ++block) {
    for (size_t end = i + load<uint32_t>(from.counts, block); i < end; ++i) {
      const size_t number = block * kBlock + load<uint16_t>(from.places, i);
      dealt[owner_of(number, owners)].push_back({number, load<float>(from.values, i)});
    }
  }
  SplitTop split;
  size_t bytes = 0;
  for (const std::vector<Element>& part : dealt) bytes += top_bytes(count, part.size());
  split.messages.resize(bytes);  // zeros
  std::byte* at = split.messages.data();
  for (const std::vector<Element>& part : dealt) {
    Parts to(at, count, part.size());
    size_t sent = 0;
    for (const Element& one : part) to.put(one.number, one.value, sent);
    split.elements.push_back(part.size());
    at += top_bytes(count, part.size());
  }
  return split;
}

size_t merge_top(void* message, std::span<const void* const> messages, std::span<const size_t> elements, size_t count,
                 size_t k, float* left) {
  const KeepSubnormals keep;
  std::vector<Parts> parts;
  for (size_t m = 0; m < messages.size(); ++m) {
    Parts& p = parts.emplace_back(const_cast<void*>(messages[m]), count, elements[m]);
    uint64_t total = 0;
    for (size_t block = 0; block < blocks_of(count); ++block) total += load<uint32_t>(p.counts, block);
    if (total != elements[m]) return m;
  }
  std::vector<Element> all;
  BlockSum sum;
  for (size_t block = 0; block < blocks_of(count); ++block) {
    const size_t begin = block * kBlock, length = std::min(kBlock, count - begin);
    for (size_t m = 0; m < parts.size(); ++m) {
      if (!sum.add(parts[m], block, length)) return m;
    }
    sum.move_to(all, begin);
  }
  Threshold threshold{0, 0};
  if (all.size() > k) {
    threshold = k == 0 ? Threshold{0xffffffff, 0}
                       : kth_greatest(all.size(), k, [&](size_t i) { return magnitude_bits(all[i].value); });
  }
  std::memset(message, 0, top_bytes(count, k));
  Parts to(message, count, k);
  size_t sent = 0;
  for (const Element& one : all) {
    const uint32_t bits = magnitude_bits(one.value);
    if (bits > threshold.bits || (bits == threshold.bits && threshold.ties > 0)) {
      threshold.ties -= bits == threshold.bits;
      to.put(one.number, one.value, sent);
    } else if (left != nullptr && bits < kInfinity) {
      const float whole = left[one.number] + one.value;
      left[one.number] = magnitude_bits(whole) < kInfinity ? whole : 0.0f;
    }
  }
  return messages.size();
}

}  // namespace dcoll::kernels
