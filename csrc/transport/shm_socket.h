// Unix-socket plumbing of the shared-memory handshake: packets, passed file descriptors, credentials. Knows nothing of
// the protocol (shm_mesh.h). Sockets are SOCK_SEQPACKET: a packet arrives whole or not at all.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>
#include <utility>

namespace dcoll {

// A file descriptor with an owner.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

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
// A packet of another length than `bytes` counts as kClosed: whoever sends it does not speak our protocol. Descriptors
// that come along are discarded unless `passed` is given.
Received receive_packet(const Fd& socket, void* data, size_t bytes, Fd* passed = nullptr);
// False when the peer is gone or does not read. `pass`: descriptor to hand over, or -1.
bool send_packet(const Fd& socket, const void* data, size_t bytes, int pass = -1);

// Readable once the process has ended; empty where the kernel has no pidfds or the process cannot be seen.
Fd open_pidfd(pid_t pid);

}  // namespace dcoll
