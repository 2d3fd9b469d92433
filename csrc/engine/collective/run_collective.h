// Every collective, as one coroutine: agree on what is called, then move the data by the path that suits the call, the
// memory and the topology (choose_path.h).
#pragma once

#include "engine/collective/fabric.h"
#include "engine/collective/handshake.h"
#include "engine/core/operation.h"
#include "engine/core/task.h"

namespace dcoll {

// The whole collective, from its beginning or from `entry` on.
Task run_collective(Fabric& fabric, Operation& operation, Entry entry = {});

// Once, before anything else on a board: where everybody's slots are, and whether all ranks can read each other's
// memory.
Task learn_slots(Fabric& fabric);

}  // namespace dcoll
