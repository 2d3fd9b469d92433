// 64-bit fingerprints of what a rank called. Not cryptographic: they guard against mistakes, not attacks.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace dcoll {

class Fingerprint {
 public:
  // FNV-1a over the bytes of a string, its length included, so that ("ab","c") and ("a","bc") differ.
  Fingerprint& add(std::string_view text) {
    for (const char c : text) step(static_cast<unsigned char>(c));
    return add(static_cast<uint64_t>(text.size()));
  }
  // A whole word per multiplication, then a shift that brings high bits down (splitmix64's finalizer).
  Fingerprint& add(uint64_t word) {
    state_ ^= word + 0x9e3779b97f4a7c15ull + (state_ << 6) + (state_ >> 2);
    state_ = (state_ ^ (state_ >> 30)) * 0xbf58476d1ce4e5b9ull;
    state_ = (state_ ^ (state_ >> 27)) * 0x94d049bb133111ebull;
    state_ ^= state_ >> 31;
    return *this;
  }
  // Both words in one round of mixing, for calls of less than a microsecond. `first` is to hold codes and lengths, so
  // that two of them differ in a few bits; the multiplication spreads a difference of `second` over all bits, where
  // that of `first` does not undo it.
  Fingerprint& add(uint64_t first, uint64_t second) { return add(first ^ second * 0xd6e8feb86659fd93ull); }
  Fingerprint& add(std::span<const int> numbers) {
    for (const int number : numbers) add(static_cast<uint64_t>(number));
    return *this;
  }
  uint64_t value() const { return state_; }

 private:
  void step(unsigned char byte) { state_ = (state_ ^ byte) * 0x100000001b3ull; }
  uint64_t state_ = 0xcbf29ce484222325ull;
};

// In 16 digits.
inline std::string hex(uint64_t value) {
  std::string text;
  for (int shift = 60; shift >= 0; shift -= 4) text += "0123456789abcdef"[value >> shift & 0xf];
  return text;
}

}  // namespace dcoll
