#include "transport/os/lifelines.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <memory>
#include <set>

#include "base/thread_safety.h"

namespace dcoll {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMostInFull = 64;  // ranks of a job in which each watches all of other machines
constexpr int kSocketFlags = SOCK_CLOEXEC | SOCK_NONBLOCK;
constexpr uint8_t kFarewell = 0x62;
constexpr uint32_t kMagic = 0x4c464344;  // "DCFL"

// The same words each way: the connecting rank's, with the token of the one that listens; the answer, with that of the
// one that connected.
struct Greeting {
  uint32_t magic = kMagic;
  int32_t from = 0;
  std::array<uint8_t, 16> token{};
};
static_assert(sizeof(Greeting) == 24);

// All that this process has, for its forked children.
struct Registry {
  Mutex mutex;  // guards the lines of all, which a fork must find in order
  std::set<Lifelines*> all DCOLL_GUARDED_BY(mutex);
};
Registry& registry();
// The lock is taken in one of these and let go in another, which no annotation says.
void before_fork() DCOLL_UNCHECKED { registry().mutex.lock(); }
void after_fork() DCOLL_UNCHECKED { registry().mutex.unlock(); }
void after_fork_in_child() DCOLL_UNCHECKED {
  for (Lifelines* one : registry().all) one->close_all();
  registry().mutex.unlock();
}
Registry& registry() {
  static Registry* const kept = [] {
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
    return new Registry;  // never destroyed: the process may fork at its end
  }();
  return *kept;
}

bool is_ipv4(const LifelineAddress::Ip& ip) {
  const LifelineAddress::Ip prefix{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::equal(prefix.begin(), prefix.begin() + 12, ip.begin());
}

std::vector<LifelineAddress::Ip> own_ips(bool loopback) {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(first, freeifaddrs);
  std::vector<LifelineAddress::Ip> found;
  for (const ifaddrs* one = first; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0) continue;
    if (!loopback && (one->ifa_flags & IFF_LOOPBACK) != 0) continue;
    LifelineAddress::Ip ip{};
    if (one->ifa_addr->sa_family == AF_INET) {
      ip[10] = ip[11] = 0xff;
      std::memcpy(&ip[12], &reinterpret_cast<const sockaddr_in*>(one->ifa_addr)->sin_addr, 4);
    } else if (one->ifa_addr->sa_family == AF_INET6) {
      const in6_addr& address = reinterpret_cast<const sockaddr_in6*>(one->ifa_addr)->sin6_addr;
      if (IN6_IS_ADDR_LINKLOCAL(&address)) continue;  // means something on one link alone
      std::memcpy(ip.data(), &address, ip.size());
    } else {
      continue;
    }
    found.push_back(ip);
  }
  std::stable_partition(found.begin(), found.end(), is_ipv4);  // ranges' is not for clang 14 with libstdc++
  return found;
}

// Both protocols where the kernel has both.
Fd listen_anywhere(uint16_t& port) {
  Fd listener(socket(AF_INET6, SOCK_STREAM | kSocketFlags, 0));
  sockaddr_storage any{};
  socklen_t bytes = sizeof(sockaddr_in6);
  const int off = 0;
  if (listener) {
    any.ss_family = AF_INET6;
    setsockopt(listener.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  } else {
    listener = Fd(socket(AF_INET, SOCK_STREAM | kSocketFlags, 0));
    any.ss_family = AF_INET;
    bytes = sizeof(sockaddr_in);
  }
  if (!listener || bind(listener.get(), reinterpret_cast<sockaddr*>(&any), bytes) != 0 ||
      listen(listener.get(), SOMAXCONN) != 0 ||
      getsockname(listener.get(), reinterpret_cast<sockaddr*>(&any), &bytes) != 0) {
    return {};
  }
  port = ntohs(any.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(any).sin6_port
                                         : reinterpret_cast<sockaddr_in&>(any).sin_port);
  return listener;
}

Fd begin_connection(const LifelineAddress::Ip& ip, uint16_t port) {
  Fd made(socket(is_ipv4(ip) ? AF_INET : AF_INET6, SOCK_STREAM | kSocketFlags, 0));
  if (!made) return made;
  int status;
  if (is_ipv4(ip)) {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(port);
    std::memcpy(&to.sin_addr, &ip[12], 4);
    status = ::connect(made.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to);
  } else {
    sockaddr_in6 to{};
    to.sin6_family = AF_INET6;
    to.sin6_port = htons(port);
    std::memcpy(&to.sin6_addr, ip.data(), ip.size());
    status = ::connect(made.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to);
  }
  if (status != 0 && errno != EINPROGRESS) made.reset();
  return made;
}

bool tell(const Fd& line, const void* data, size_t bytes) {
  return send(line.get(), data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(bytes);
}

void bid_farewell(const Fd& line) { tell(line, &kFarewell, sizeof kFarewell); }

// A connection on the way to a line. Whoever connects speaks first.
struct Attempt {
  Fd socket;
  int peer = -1;           // unknown for one that was accepted
  bool connects = false;   // and is not connected yet
  bool connected = false;  // by this rank
  Greeting theirs{};
  size_t got = 0;
};

}  // namespace

Lifelines::Lifelines(bool loopback) {
  const std::vector<LifelineAddress::Ip> ips = own_ips(loopback);
  if (getrandom(own_.token.data(), own_.token.size(), 0) == static_cast<ssize_t>(own_.token.size()) && !ips.empty()) {
    listener_ = listen_anywhere(own_.port);
  }
  if (listener_) own_.count = static_cast<uint32_t>(std::min(ips.size(), LifelineAddress::kMost));
  std::copy_n(ips.begin(), own_.count, own_.ips.begin());
  const MutexLock lock(registry().mutex);
  registry().all.insert(this);
}

Lifelines::~Lifelines() {
  if (!fork_.in_child()) {
    for (const auto& [rank, line] : lines_) bid_farewell(line);
  }
  const MutexLock lock(registry().mutex);
  registry().all.erase(this);
  lines_.clear();
}

void Lifelines::close_all() {
  listener_.reset();
  for (auto& [rank, line] : lines_) line.reset();
}

std::vector<int> Lifelines::connect(const std::vector<LifelineAddress>& of_ranks,
                                    const std::vector<int>& machine_of_rank, int own_rank,
                                    std::chrono::milliseconds limit, const std::function<void()>& look_around) {
  const std::vector<int> wanted = watched_from(own_rank, machine_of_rank);
  std::map<int, Fd> lines;
  std::list<Attempt> attempts;
  for (const int peer : wanted) {
    if (peer < own_rank) continue;  // it connects
    const LifelineAddress& to = of_ranks[static_cast<size_t>(peer)];
    for (uint32_t i = 0; i < std::min<uint32_t>(to.count, LifelineAddress::kMost); ++i) {
      if (Fd socket = begin_connection(to.ips[i], to.port)) {
        attempts.push_back({.socket = std::move(socket), .peer = peer, .connects = true, .connected = true});
      }
    }
  }
  // False: this one leads nowhere.
  const auto advance = [&](Attempt& one, short events) {
    if (one.connects) {
      if (events == 0) return true;
      const Greeting mine{.from = own_rank, .token = of_ranks[static_cast<size_t>(one.peer)].token};
      one.connects = false;
      if ((events & POLLOUT) == 0 || !tell(one.socket, &mine, sizeof mine)) return false;
    }
    auto* const into = reinterpret_cast<std::byte*>(&one.theirs);
    const ssize_t got = recv(one.socket.get(), into + one.got, sizeof one.theirs - one.got, MSG_DONTWAIT);
    if (got <= 0) return got < 0 && (errno == EAGAIN || errno == EINTR);
    one.got += static_cast<size_t>(got);
    if (one.got < sizeof one.theirs) return true;
    const int peer = one.theirs.from;
    if (one.theirs.magic != kMagic || one.theirs.token != own_.token || lines.contains(peer)) return false;
    if (one.connected ? peer != one.peer : peer >= own_rank || !std::ranges::count(wanted, peer)) return false;
    const Greeting answer{.from = own_rank, .token = of_ranks[static_cast<size_t>(peer)].token};
    if (!one.connected && !tell(one.socket, &answer, sizeof answer)) return false;
    lines[peer] = std::move(one.socket);
    return false;
  };
  const auto deadline = Clock::now() + limit;
  while (listener_ && lines.size() < wanted.size() && Clock::now() < deadline) {
    if (look_around) look_around();
    std::vector<pollfd> polled{{listener_.get(), POLLIN, 0}};
    for (const Attempt& one : attempts) {
      polled.push_back({one.socket.get(), static_cast<short>(one.connects ? POLLOUT : POLLIN), 0});
    }
    poll(polled.data(), polled.size(), 20);
    size_t at = 1;
    std::erase_if(attempts, [&](Attempt& one) { return !advance(one, polled[at++].revents); });
    while (Fd socket = Fd(accept4(listener_.get(), nullptr, nullptr, kSocketFlags))) {
      attempts.push_back({.socket = std::move(socket)});
    }
  }
  for (const Attempt& one : attempts) bid_farewell(one.socket);  // the other side may hold it for a line already
  std::vector<int> without;
  std::ranges::copy_if(wanted, std::back_inserter(without), [&](int peer) { return !lines.contains(peer); });
  const MutexLock lock(registry().mutex);
  listener_.reset();
  lines_ = std::move(lines);
  return without;
}

std::vector<int> Lifelines::ended() {
  std::vector<int> found;
  const MutexLock lock(registry().mutex);
  std::erase_if(lines_, [&](const auto& entry) {
    uint8_t word = 0;
    const ssize_t got = recv(entry.second.get(), &word, sizeof word, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (got == 0 || (got < 0 && errno == ECONNRESET)) {
      found.push_back(entry.first);
      return false;  // and is told of again
    }
    return true;  // a farewell; or an error of the network, which tells nothing of the process
  });
  return found;
}

std::vector<int> watched_from(int rank, const std::vector<int>& machine_of_rank) {
  std::map<int, std::vector<int>> on_machine;
  for (size_t other = 0; other < machine_of_rank.size(); ++other) {
    on_machine[machine_of_rank[other]].push_back(static_cast<int>(other));
  }
  const auto own = on_machine.find(machine_of_rank[static_cast<size_t>(rank)]);
  std::set<int> found;
  if (on_machine.size() == 1) return {};
  if (machine_of_rank.size() <= kMostInFull) {
    for (const auto& [machine, ranks] : on_machine) {
      if (machine != own->first) found.insert(ranks.begin(), ranks.end());
    }
    return {found.begin(), found.end()};
  }
  const auto next = [&](auto at) { return std::next(at) == on_machine.end() ? on_machine.begin() : std::next(at); };
  for (auto at = on_machine.begin(); at != on_machine.end(); ++at) {
    const std::vector<int>&here = at->second, &there = next(at)->second;
    for (size_t i = 0; i < std::max(here.size(), there.size()); ++i) {
      const int one = here[i % here.size()], other = there[i % there.size()];
      if (one == rank) found.insert(other);
      if (other == rank) found.insert(one);
    }
  }
  return {found.begin(), found.end()};
}

}  // namespace dcoll
