// Unix-socket plumbing of the shared-memory handshake: packets, passed file descriptors, credentials. Knows nothing of
// the protocol (shm_mesh.h). Sockets are SOCK_SEQPACKET: a packet arrives whole or not at all.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>
#include <string>

#include "transport/os/fd.h"

namespace dcoll {

// All sockets are non-blocking and closed on exec. `name` is in the abstract namespace: no file, nothing left behind.
Fd listen_at(const std::string& name, int backlog);  // throws TransportError
Fd connect_to(const std::string& name);              // empty when nobody listens there (yet)
Fd accept_from(const Fd& listener);                  // empty when nobody is waiting

struct Credentials {
  pid_t pid;  // 0 when the process lives in a pid namespace we cannot see
  uid_t uid;
};
Credentials peer_credentials(const Fd& socket);

enum class Received { kPacket, kNothingYet, kClosed };
// The most descriptors that travel with a packet.
inline constexpr size_t kMostPassed = 2;
// A packet of another length than `bytes` counts as kClosed: whoever sends it does not speak our protocol. Descriptors
// that come along go to `passed`; those for which there is no room there are closed.
Received receive_packet(const Fd& socket, void* data, size_t bytes, std::span<Fd> passed = {});
// False when the peer is gone or does not read. `pass`: descriptors to hand over, at most kMostPassed.
bool send_packet(const Fd& socket, const void* data, size_t bytes, std::span<const int> pass = {});

}  // namespace dcoll
