// SipHash-2-4 (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012, section 2): a keyed 64-bit hash. It
// proves knowledge of the job's key during the shared-memory handshake and hides the key in socket names. Own code,
// because a few dozen lines are no reason to depend on a cryptography library.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace dcoll {

using SipKey = std::array<uint8_t, 16>;

inline uint64_t siphash(const SipKey& key, const void* data, size_t bytes) {
  static_assert(std::endian::native == std::endian::little);
  uint64_t k0, k1;
  std::memcpy(&k0, key.data(), 8);
  std::memcpy(&k1, key.data() + 8, 8);
  uint64_t v0 = k0 ^ 0x736f6d6570736575ull, v1 = k1 ^ 0x646f72616e646f6dull;
  uint64_t v2 = k0 ^ 0x6c7967656e657261ull, v3 = k1 ^ 0x7465646279746573ull;
  auto rounds = [&](int count) {
    for (int i = 0; i < count; ++i) {
      v0 += v1, v1 = std::rotl(v1, 13), v1 ^= v0, v0 = std::rotl(v0, 32);
      v2 += v3, v3 = std::rotl(v3, 16), v3 ^= v2;
      v0 += v3, v3 = std::rotl(v3, 21), v3 ^= v0;
      v2 += v1, v1 = std::rotl(v1, 17), v1 ^= v2, v2 = std::rotl(v2, 32);
    }
  };
  auto absorb = [&](uint64_t word) {
    v3 ^= word;
    rounds(2);
    v0 ^= word;
  };
  const auto* at = static_cast<const uint8_t*>(data);
  size_t left = bytes;
  for (; left >= 8; at += 8, left -= 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    absorb(word);
  }
  uint64_t last = static_cast<uint64_t>(bytes) << 56;
  for (size_t i = 0; i < left; ++i) last |= static_cast<uint64_t>(at[i]) << (8 * i);
  absorb(last);
  v2 ^= 0xff;
  rounds(4);
  return v0 ^ v1 ^ v2 ^ v3;
}

}  // namespace dcoll
