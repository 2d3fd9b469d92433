// The handshake that a collective between nodes begins with (Dissemination in engine/board/agreement.h): what may ride
// on it, and what it costs.
#pragma once

#include <cstdint>

#include "plan/topology.h"

namespace dcoll::plan {

// Two fingerprints at the head of every message.
inline constexpr uint64_t kAgreementHeaderBytes = 16;

// Whether operands of `bytes` may ride on the handshake of `ranks`, in messages of at most `message_bytes`.
bool rides_on_agreement(uint64_t bytes, uint32_t ranks, uint64_t message_bytes);

// Microseconds until all ranks have seen all fingerprints, and the `riding_bytes` of every rank.
double agreement_us(const Topology& topology, uint64_t riding_bytes);

}  // namespace dcoll::plan
