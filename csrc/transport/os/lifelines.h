// Ranks of other machines, watched by a TCP connection each: when a process ends, however, the kernel of its machine
// closes its sockets, so its death is noticed although MPI says nothing (its messages then simply never come). Nothing
// is sent over a line but the greeting and a farewell, which tells an orderly end from a death; so a network that is
// cut for a while ends none. Where no connection comes about, a death there is found at the deadline.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "base/fork.h"
#include "transport/os/fd.h"

namespace dcoll {

// Where a rank listens for lines, and what shows that whoever comes is of the job. Exchanged at start-up, bytewise.
struct LifelineAddress {
  static constexpr size_t kMost = 6;
  using Ip = std::array<uint8_t, 16>;  // IPv6; IPv4 as ::ffff:a.b.c.d
  std::array<Ip, kMost> ips{};         // of the network interfaces
  uint32_t count = 0;
  uint16_t port = 0;
  std::array<uint8_t, 16> token{};  // random, of this rank in this start-up
};

class Lifelines {
 public:
  // Listens; without a socket or an address it has no lines. loopback: this machine's own address is told too.
  explicit Lifelines(bool loopback = false);
  ~Lifelines();
  Lifelines(const Lifelines&) = delete;
  Lifelines& operator=(const Lifelines&) = delete;

  const LifelineAddress& address() const { return own_; }
  // Connects this rank to those it watches, who do likewise; collective. `machine_of_rank`: equal for those that need
  // no line between them. Returns the ranks to which there is none when `limit` has passed.
  std::vector<int> connect(const std::vector<LifelineAddress>& of_ranks, const std::vector<int>& machine_of_rank,
                           int own_rank, std::chrono::milliseconds limit, const std::function<void()>& look_around);
  // The ranks whose process has ended without a farewell. Any thread.
  std::vector<int> ended();
  // In a forked child, which would keep its parent's lines open beyond the parent's death.
  void close_all();

 private:
  const ForkGuard fork_;
  LifelineAddress own_;
  Fd listener_;
  std::map<int, Fd> lines_;  // by rank
};

// Per rank, the ranks that it watches and that watch it: all of other machines in a job of few, else those in its place
// on the machines before and behind its own, in a ring of machines.
std::vector<int> watched_from(int rank, const std::vector<int>& machine_of_rank);

}  // namespace dcoll
