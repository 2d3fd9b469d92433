// How the processes of a node find each other, make sure whom they talk to, and exchange their memory.
//
// Rank i connects to every rank below it and is connected to by every rank above it, over abstract Unix sockets whose
// names are keyed hashes: they can be seen but not predicted, and do not tell the key. On each connection, both sides
// alike:
//   0. Compare the other process's user (SO_PEERCRED) with ours; otherwise hang up before a byte was sent.
//   1. Send Hello: who we are, our memory layout, a random nonce.
//   2. On the other's Hello send Proof: a hash, keyed with the job's key, over both Hellos, the own one first. It
//      cannot be replayed (nonces) nor reflected (each side's Hello names another rank).
//   3. On the other's Proof, and only then, send Segment with the descriptors of our memory and our bell.
//   4. On the other's Segment check size and seals (sealed against shrinking: no SIGBUS later), and map it.
// One event loop serves all connections, so a stranger that connects and stalls delays nobody.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/mapped/mapped.h"
#include "transport/mapped/shm.h"
#include "transport/mapped/shm_socket.h"
#include "transport/os/siphash.h"

namespace dcoll {

// The far end of a finished handshake.
struct MeshPeer {
  Fd socket;
  Fd pidfd;     // may be empty
  int pid = 0;  // as seen from here; if its pid namespace is hidden from us, as the peer sees itself
  std::shared_ptr<Region> region;
  // Why there is no region. The handshake goes on all the same, so that no other rank waits for one that has left it.
  std::exception_ptr unmapped;
};

// An anonymous file of `bytes`, which can no longer change its size.
Fd create_segment(size_t bytes);
// Maps a segment that came from a peer. Throws TransportError when it is not what `layout` asks for.
std::shared_ptr<Region> map_segment(const Fd& segment, const RegionLayout& layout, int local_rank);

// The name local rank `local_rank` listens at.
std::string mesh_address(const SipKey& key, int local_rank);

// By local rank; the own entry stays empty.
std::vector<MeshPeer> connect_mesh(const ShmPeers& peers, const RegionLayout& layout, const Fd& segment, const Fd& bell,
                                   std::chrono::milliseconds limit, const std::function<void()>& look_around);

}  // namespace dcoll
