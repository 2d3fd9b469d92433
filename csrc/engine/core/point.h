// How messages between two ranks (engine/p2p) are told apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "engine/core/call.h"

namespace dcoll {

inline constexpr int kAnySource = -1;  // as the peer of a receive

// Tags of the user, and of the core itself, never meet.
enum class PointSpace : uint32_t { kUser = 0, kGroups = 1 };
constexpr uint64_t point_key(PointSpace space, int32_t tag) {
  return uint64_t{static_cast<uint32_t>(space)} << 32 | static_cast<uint32_t>(tag);
}

// A send of this memory, or a receive into it.
Request message(Kind kind, const void* memory, size_t bytes, int peer, uint64_t key);

// ArgumentError unless a send to, or a receive from, this peer can work among so many ranks.
void check_peer(Kind kind, int peer, int size);

// "send (4 bytes to rank 1, tag 0)". peer: as messages call it, or kAnySource.
std::string describe_point(Kind kind, size_t bytes, int peer, uint64_t key);

}  // namespace dcoll
