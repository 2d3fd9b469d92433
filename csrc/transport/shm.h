// Processes of one node: every rank's memory is an anonymous memfd, passed to the peers over abstract Unix sockets, so
// nothing is left in /dev/shm whatever happens. A segment goes only to a process of the same user (SO_PEERCRED) that
// knows the job's random key. The sockets stay open: their closing tells that a peer died.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <vector>

#include "transport/endpoint.h"

namespace dcoll {

struct ShmPeers {
  int local_rank = 0;
  int local_size = 1;
  std::array<uint8_t, 16> key{};  // the job's random key, the same on all ranks, from rank 0 through MPI
  std::vector<int> job_ranks{};   // of the local ranks, for messages; empty: they say "local rank N"
};

// Connects to all local peers; collective over the node. Peers are numbered by local rank in the resulting transport.
// Throws TransportError (naming the local rank and the cause) when a peer cannot be reached or mapped before
// `deadline`.
Endpoint connect_shm(const ShmPeers& peers, const MappedOptions& options, std::chrono::milliseconds deadline);

}  // namespace dcoll
