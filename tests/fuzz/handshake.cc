// The handshake of the ranks of a node, against a process that speaks first and speaks nonsense: it is turned away, and
// the rank goes on looking for its peer until the time is up.
//
// Input: packets, each a byte for its length before it. A first packet whose length is the Hello's is sent with a right
// Proof behind it, as a rank of the job would, so that what comes after the Proof is reached; with a later packet of
// even length go two descriptors.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <thread>
#include <vector>

#include "base/error.h"
#include "fuzz.h"
#include "transport/mapped/shm_mesh.h"
#include "transport/mapped/shm_socket.h"
#include "transport/os/siphash.h"

using namespace dcoll;

namespace {

// On the wire; shm_mesh.cc says what they mean.
constexpr size_t kHelloBytes = 56;
constexpr uint64_t kHelloMagic = 0x6f6c6c6568636c64ull, kProofMagic = 0x666f6f7270636c64ull;

void prove(const Fd& socket, const SipKey& key, std::vector<uint8_t> hello) {
  uint8_t both[2 * kHelloBytes];
  while (receive_packet(socket, both + kHelloBytes, kHelloBytes) == Received::kNothingYet) std::this_thread::yield();
  constexpr uint32_t kVersion = 2, kRank = 1;
  std::memcpy(&hello[0], &kHelloMagic, 8);
  std::memcpy(&hello[8], &kVersion, 4);
  std::memcpy(&hello[12], &kRank, 4);
  std::memcpy(both, hello.data(), kHelloBytes);
  const uint64_t proof[2] = {kProofMagic, siphash(key, both, sizeof both)};
  send_packet(socket, hello.data(), hello.size());
  send_packet(socket, proof, sizeof proof);
}

void speak(const Fd& socket, const SipKey& key, const uint8_t* data, size_t size) {
  const Fd memory = create_segment(4096);
  for (size_t at = 0; at < size;) {
    const size_t bytes = std::min<size_t>(data[at], size - at - 1);
    const std::vector<uint8_t> packet(data + at + 1, data + at + 1 + bytes);
    if (at == 0 && bytes == kHelloBytes) {
      prove(socket, key, packet);
    } else if (bytes > 0) {
      const int passed[] = {memory.get(), memory.get()};
      const std::span<const int> with = bytes % 2 == 0 ? std::span<const int>(passed) : std::span<const int>{};
      send_packet(socket, packet.data(), bytes, with);
    }
    at += 1 + bytes;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const RegionLayout layout(2, {.arena_bytes = 1 << 16, .slot_bytes = 64, .slots = 1});
  static const Fd segment = create_segment(layout.region_bytes), bell = create_segment(8);
  static uint64_t tries = 0;
  SipKey key{};
  const uint64_t unique[2] = {static_cast<uint64_t>(getpid()), ++tries};
  std::memcpy(key.data(), unique, sizeof key);
  const ShmPeers peers{.local_rank = 0, .local_size = 2, .key = key};
  std::thread stranger([&] {
    Fd socket;
    for (int looks = 0; !socket && looks < 1000; ++looks) {
      socket = connect_to(mesh_address(key, 0));
      if (!socket) std::this_thread::yield();
    }
    if (socket) speak(socket, key, data, size);
  });
  bool connected = false;
  try {
    connected = !connect_mesh(peers, layout, segment, bell, std::chrono::milliseconds(5), {})[1].unmapped;
  } catch (const TransportError&) {
  }
  stranger.join();
  FUZZ_CHECK(!connected);  // no memory of the right size came
  return 0;
}
