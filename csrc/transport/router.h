// One transport to the rest of the communicator, made of one per medium: peers of the node through shared memory, the
// others through MPI. Its peers are ranks of the communicator.
#pragma once

#include <memory>
#include <vector>

#include "transport/transport.h"

namespace dcoll {

// `local` is indexed by local rank; local_ranks[i] is the communicator rank of local rank i. `remote` is indexed by
// communicator rank, and is all there is where `local` is null or of this rank alone.
std::unique_ptr<Transport> make_router(int rank, int size, std::unique_ptr<Transport> local,
                                       std::vector<int> local_ranks, std::unique_ptr<Transport> remote);

}  // namespace dcoll
