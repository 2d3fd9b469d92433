// A 64-bit hash of memory, to find out whether ranks hold the same bits. Not cryptographic.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace dcoll {

// Four chains of multiply and rotate side by side, 32 bytes per turn, as xxHash does (Collet, "xxHash fast digest
// algorithm", XXH64): one chain would wait for its own multiplication, and take four times as long.
inline uint64_t hash_memory(const void* data, size_t bytes) {
  constexpr uint64_t kP1 = 0x9e3779b185ebca87ull, kP2 = 0xc2b2ae3d27d4eb4full, kP3 = 0x165667b19e3779f9ull;
  const auto* at = static_cast<const unsigned char*>(data);
  const auto word = [](const unsigned char* from, size_t size = sizeof(uint64_t)) {
    uint64_t value = 0;
    if (size > 0) std::memcpy(&value, from, size);
    return value;
  };
  const auto turn = [](uint64_t state, uint64_t input) { return std::rotl(state + input * kP2, 31) * kP1; };
  uint64_t lanes[4] = {kP1 + kP2, kP2, 0, 0 - kP1};
  size_t left = bytes;
  for (; left >= sizeof lanes; left -= sizeof lanes, at += sizeof lanes) {
    for (size_t i = 0; i < 4; ++i) lanes[i] = turn(lanes[i], word(at + i * sizeof(uint64_t)));
  }
  uint64_t hash = bytes * kP3;
  for (size_t i = 0; i < 4; ++i) hash = (hash ^ turn(0, lanes[i])) * kP1 + kP3;
  for (; left > 0;) {
    const size_t size = left < sizeof(uint64_t) ? left : sizeof(uint64_t);
    hash = std::rotl(hash ^ turn(0, word(at, size)), 27) * kP1 + kP3;
    at += size;
    left -= size;
  }
  hash = (hash ^ (hash >> 33)) * kP2;
  hash = (hash ^ (hash >> 29)) * kP3;
  return hash ^ (hash >> 32);
}

}  // namespace dcoll
