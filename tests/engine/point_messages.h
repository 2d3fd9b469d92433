// What tests of messages between two ranks have in common.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/p2p/point_to_point.h"
#include "rank_threads.h"

namespace dcoll::test {

using Bytes = std::vector<std::byte>;

inline Settings on_two_nodes() {
  Settings settings = test_settings();
  settings.nodes = {0, 0, 1};
  return settings;
}

inline const std::vector<Settings>& layouts() {
  static const std::vector<Settings> all = {test_settings(), without_shared_memory(), on_two_nodes()};
  return all;
}

inline uint64_t key(int32_t tag) { return point_key(PointSpace::kUser, tag); }

inline void fill(std::byte* data, size_t bytes, unsigned what) {
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(what * 131 + i * 7 + (i >> 8));
}

inline bool holds(const std::byte* data, size_t bytes, unsigned what) {
  for (size_t i = 0; i < bytes; ++i) {
    if (data[i] != static_cast<std::byte>(what * 131 + i * 7 + (i >> 8))) return false;
  }
  return true;
}

inline void send(Communicator& comm, const void* data, size_t bytes, int peer, int32_t tag = 0) {
  comm.wait(*comm.submit(message(Kind::kSend, data, bytes, peer, key(tag))));
}

inline int recv(Communicator& comm, void* data, size_t bytes, int peer, int32_t tag = 0) {
  const auto received = comm.submit(message(Kind::kReceive, data, bytes, peer, key(tag)));
  comm.wait(*received);
  return received->source;
}

}  // namespace dcoll::test
