#include "transport/os/tcp_congestion.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string_view>

#include "base/error.h"

namespace dcoll {
namespace {

constexpr std::string_view kAuto = "auto", kKeep = "keep";
constexpr const char* kBetter = "cubic";
constexpr size_t kNameBytes = 16;  // TCP_CA_NAME_MAX

bool set_algorithm(int socket, const std::string& name) {
  return setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) == 0;
}

// Empty where `descriptor` is no TCP socket.
std::string algorithm_of(int descriptor) {
  char name[kNameBytes + 1] = "";
  socklen_t length = kNameBytes;
  return getsockopt(descriptor, IPPROTO_TCP, TCP_CONGESTION, name, &length) == 0 ? name : "";
}

bool is_loopback(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(address);
    return ntohl(in.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
  }
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
}

bool same_host(const sockaddr_storage& a, const sockaddr_storage& b) {
  if (a.ss_family != b.ss_family) return false;
  if (a.ss_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(a).sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in&>(b).sin_addr.s_addr;
  }
  return IN6_ARE_ADDR_EQUAL(&reinterpret_cast<const sockaddr_in6&>(a).sin6_addr,
                            &reinterpret_cast<const sockaddr_in6&>(b).sin6_addr);
}

bool leads_elsewhere(int socket) {
  sockaddr_storage here{}, there{};
  socklen_t here_length = sizeof here, there_length = sizeof there;
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&here), &here_length) != 0) return false;
  if (here.ss_family != AF_INET && here.ss_family != AF_INET6) return false;
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&there), &there_length) != 0) return false;  // not connected
  return !is_loopback(there) && !same_host(here, there);
}

std::string allowed_algorithms() {
  std::ifstream file("/proc/sys/net/ipv4/tcp_allowed_congestion_control");
  std::string line;
  return std::getline(file, line) ? line : "unknown";
}

}  // namespace

TcpCongestion::TcpCongestion(std::string wanted) : wanted_(std::move(wanted)) {
  if (wanted_ == kAuto || wanted_ == kKeep) return;
  const int probe = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (probe < 0) return;  // no IPv4 here: nothing can be said before there is a connection
  const bool taken = wanted_.size() < kNameBytes && set_algorithm(probe, wanted_);
  const std::string why = std::strerror(errno);
  close(probe);
  if (taken) return;
  throw ArgumentError("DCOLL_TCP_CONGESTION='" + wanted_ + "' is not possible here (" + why +
                      "): allowed are auto, keep and what this system lets every program choose: " +
                      allowed_algorithms() + ". Change or unset the variable on every rank.");
}

int TcpCongestion::see_to(const std::vector<int>& descriptors) const {
  int changed = 0;
  if (wanted_ == kKeep) return changed;
  for (const int descriptor : descriptors) changed += see_to(descriptor) ? 1 : 0;
  return changed;
}

bool TcpCongestion::see_to(int descriptor) const {
  const std::string now = algorithm_of(descriptor);
  if (now.empty()) return false;
  if (wanted_ == kAuto ? now != "bbr" : now == wanted_) return false;
  // A system that does not allow CUBIC keeps what it has.
  return leads_elsewhere(descriptor) && set_algorithm(descriptor, wanted_ == kAuto ? kBetter : wanted_);
}

}  // namespace dcoll
