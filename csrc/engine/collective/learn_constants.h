// The constants of the cost model are measured at the first choice between algorithms for several nodes, once per
// communicator, unless an earlier job of the same kind has left them in the cache. What encoding takes is measured at
// the first call that asks whether it pays.
#pragma once

#include "engine/collective/fabric.h"
#include "engine/core/task.h"

namespace dcoll {

// All ranks together. Afterwards the topology of the fabric has the same constants on every rank. On two levels it
// makes posts on the node's board, so those before are gone.
Task learn_constants(Fabric& fabric, Call call);

}  // namespace dcoll
