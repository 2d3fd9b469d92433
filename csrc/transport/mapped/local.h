// Ranks as threads of one process, over the same mapped-memory FIFOs that shm uses: for tests (and TSan), and for
// size 1.
#pragma once

#include <vector>

#include "transport/endpoint.h"

namespace dcoll {

// n endpoints, endpoint r for rank r. They share ownership of the memory; destroying one closes it for the others
// (check_peers() of the others then throws PeerError).
// numa_nodes: by rank, for tests of what depends on them; empty: unknown.
std::vector<Endpoint> connect_local(int n, const MappedOptions& options, const std::vector<int>& numa_nodes = {});

}  // namespace dcoll
