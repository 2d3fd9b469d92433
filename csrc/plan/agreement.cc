#include "plan/agreement.h"

#include <algorithm>

namespace dcoll::plan {

bool rides_on_agreement(uint64_t bytes, uint32_t ranks, uint64_t message_bytes) {
  // What a rank receives in all, beyond which an algorithm that moves fewer bytes is faster; and the longest message,
  // which should leave at once (Open MPI sends up to 64 KiB without asking the receiver).
  constexpr uint64_t kMostBytes = uint64_t{64} << 10, kEagerBytes = uint64_t{60} << 10;
  return bytes > 0 && bytes <= kMostBytes / ranks &&
         kAgreementHeaderBytes + (ranks + uint64_t{1}) / 2 * bytes <= std::min(message_bytes, kEagerBytes);
}

double agreement_us(const Topology& topology, uint64_t riding_bytes) {
  const LinkModel& link = topology.network;
  double way_us = 0, link_us = 0, riding_us = 0;
  for (uint64_t distance = 1; distance < topology.num_ranks; distance *= 2) {
    const uint64_t passed_on = std::min(distance, topology.num_ranks - distance) * riding_bytes;
    const auto bytes = static_cast<double>(kAgreementHeaderBytes + passed_on);
    riding_us += static_cast<double>(passed_on) * link.transit();
    way_us += link.alpha_us + 2 * link.overhead_us + bytes * link.transit();
    link_us += bytes * link.beta_us_per_byte;
  }
  if (topology.handshake_us >= 0) way_us = topology.handshake_us + riding_us;
  // As in predict_us(): in a row of calls, none is faster than its bytes pass the link.
  const auto reduced = static_cast<double>(topology.num_ranks * riding_bytes);
  return std::max(way_us, link_us) + reduced * topology.gamma_us_per_byte;
}

}  // namespace dcoll::plan
