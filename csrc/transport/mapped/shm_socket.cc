#include "transport/mapped/shm_socket.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "transport/mapped/region.h"

namespace dcoll {
namespace {

constexpr int kSocketType = SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK;

struct Address {
  sockaddr_un value{};
  socklen_t bytes;
};

Address abstract_address(const std::string& name) {
  Address address;
  address.value.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof(address.value.sun_path)) throw TransportError("socket name too long: " + name);
  std::memcpy(address.value.sun_path + 1, name.data(), name.size());  // leading zero byte: abstract
  address.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

Fd open_socket() {
  Fd socket_fd(socket(AF_UNIX, kSocketType, 0));
  if (!socket_fd) throw TransportError(errno_text("cannot open a Unix socket", errno));
  return socket_fd;
}

std::vector<Fd> descriptors_in(msghdr& message) {
  std::vector<Fd> found;
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = CMSG_LEN(0); at + sizeof(int) <= c->cmsg_len; at += sizeof(int)) {
      int fd;
      std::memcpy(&fd, reinterpret_cast<const char*>(c) + at, sizeof(fd));
      found.emplace_back(fd);
    }
  }
  return found;
}

}  // namespace

Fd listen_at(const std::string& name, int backlog) {
  const Address address = abstract_address(name);
  Fd listener = open_socket();
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address.value), address.bytes) != 0 ||
      listen(listener.get(), backlog) != 0) {
    throw TransportError(errno_text("cannot listen on the Unix socket @" + name, errno));
  }
  return listener;
}

Fd connect_to(const std::string& name) {
  const Address address = abstract_address(name);
  Fd socket_fd = open_socket();
  int rc;
  do {
    rc = connect(socket_fd.get(), reinterpret_cast<const sockaddr*>(&address.value), address.bytes);
  } while (rc != 0 && errno == EINTR);
  // ECONNREFUSED: nobody listens yet. EAGAIN: the queue is full. Either way the caller tries again until its deadline.
  return rc == 0 ? std::move(socket_fd) : Fd();
}

Fd accept_from(const Fd& listener) {
  for (;;) {
    Fd accepted(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (accepted) return accepted;
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno == EAGAIN) return Fd();
    throw TransportError(errno_text("cannot accept a local peer", errno) +
                         "; raise the limit on open files (ulimit -n)");
  }
}

Credentials peer_credentials(const Fd& socket_fd) {
  ucred credentials{};
  socklen_t bytes = sizeof(credentials);
  if (getsockopt(socket_fd.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0) {
    throw TransportError(errno_text("cannot read the credentials of a local peer", errno));
  }
  return {credentials.pid, credentials.uid};
}

Received receive_packet(const Fd& socket_fd, void* data, size_t bytes, std::span<Fd> passed) {
  iovec part{data, bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostPassed * sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!passed.empty()) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
  }
  ssize_t got;
  int resets = 0;
  do {
    got = recvmsg(socket_fd.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    // A peer that closed with unread packets makes the first call fail, although packets it sent are still here to
    // read.
  } while (got < 0 && (errno == EINTR || (errno == ECONNRESET && resets++ == 0)));
  if (got < 0 && errno == EAGAIN) return Received::kNothingYet;
  if (got < 0) return Received::kClosed;
  std::vector<Fd> descriptors = descriptors_in(message);
  if (static_cast<size_t>(got) != bytes || (message.msg_flags & MSG_TRUNC) != 0) return Received::kClosed;
  if (descriptors.size() < passed.size() && (message.msg_flags & MSG_CTRUNC) != 0) {
    throw TransportError(errno_text("cannot take what a local peer shares", EMFILE) +
                         "; raise the limit on open files (ulimit -n)");
  }
  for (size_t i = 0; i < std::min(passed.size(), descriptors.size()); ++i) passed[i] = std::move(descriptors[i]);
  return Received::kPacket;
}

bool send_packet(const Fd& socket_fd, const void* data, size_t bytes, std::span<const int> pass) {
  iovec part{const_cast<void*>(data), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostPassed * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!pass.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(pass.size_bytes());
    cmsghdr* c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(pass.size_bytes());
    std::memcpy(CMSG_DATA(c), pass.data(), pass.size_bytes());
  }
  ssize_t put;
  do {
    put = sendmsg(socket_fd.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (put < 0 && errno == EINTR);
  return put == static_cast<ssize_t>(bytes);
}

}  // namespace dcoll
