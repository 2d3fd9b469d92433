// Internal to kernels: the layout of topk.h's messages, and the k-th greatest of magnitudes.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace dcoll::kernels::top {

constexpr size_t kBlock = size_t{1} << 16;
constexpr uint32_t kInfinity = 0x7f800000;

inline uint32_t magnitude_bits(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffff; }
constexpr size_t blocks_of(size_t count) { return (count + kBlock - 1) / kBlock; }

// Those beyond `bits` are taken, and the first `ties` of those that equal it.
struct Threshold {
  uint32_t bits;
  size_t ties;
};

// Of the k-th greatest of key(0) .. key(count - 1), which have 31 bits; 1 <= k <= count.
template <class Key>
Threshold kth_greatest(size_t count, size_t k, const Key& key) {
  struct Digit {
    unsigned above, shift, width;
  };
  constexpr Digit kDigits[] = {{31, 20, 11}, {20, 10, 10}, {10, 0, 10}};
  uint32_t found = 0;
  for (const Digit& digit : kDigits) {
    std::array<uint32_t, 2048> bins{};
    const uint32_t mask = (1u << digit.width) - 1;
    for (size_t i = 0; i < count; ++i) {
      const uint32_t bits = key(i);
      if (bits >> digit.above == found) ++bins[bits >> digit.shift & mask];
    }
    uint32_t bin = mask;
    while (bins[bin] < k) k -= bins[bin--];
    found = found << digit.width | bin;
  }
  return {found, k};
}

template <class T>
T load(const std::byte* at, size_t i) {
  T value;
  std::memcpy(&value, at + i * sizeof(T), sizeof(T));
  return value;
}
template <class T>
void store(std::byte* at, size_t i, T value) {
  std::memcpy(at + i * sizeof(T), &value, sizeof(T));
}

// The parts of a message.
struct Parts {
  Parts(void* message, size_t count, size_t k)
      : counts(static_cast<std::byte*>(message)),
        places(counts + 4 * blocks_of(count)),
        values(places + (2 * k + 3) / 4 * 4) {}

  // The next element; sent: how many there are.
  void put(size_t number, float value, size_t& sent) {
    const size_t block = number / kBlock;
    store(counts, block, load<uint32_t>(counts, block) + 1);
    store(places, sent, static_cast<uint16_t>(number % kBlock));
    store(values, sent, value);
    ++sent;
  }

  std::byte *counts, *places, *values;
};

}  // namespace dcoll::kernels::top
