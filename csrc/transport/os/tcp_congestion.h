// The congestion control of MPI's TCP connections to other nodes.
//
// Collectives send in bursts, wait for each other, and cross where several senders meet at one receiver. BBR (Cardwell
// et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14(5), 2016) sends at a rate it has seen delivered
// before: a connection that had little to send for a while, or shared its link, is held to that rate until it has
// probed its way up again, and every 10 s it sends four packets per round trip for 200 ms. CUBIC (RFC 9438) has
// neither. What that costs is in docs/notebook/between-nodes.md.
#pragma once

#include <string>
#include <vector>

namespace dcoll {

class TcpCongestion {
 public:
  // "auto": CUBIC instead of BBR, where the kernel allows it; "keep": as the system has it; else the name of an
  // algorithm, for every connection. Throws ArgumentError for one that the kernel does not know or allow.
  explicit TcpCongestion(std::string wanted);

  // Sees to those of `descriptors` that are TCP connections to another machine. How many it changed.
  int see_to(const std::vector<int>& descriptors) const;

 private:
  bool see_to(int descriptor) const;

  std::string wanted_;
};

}  // namespace dcoll
