// Every collective, as one coroutine: agree on what is called, then move the data by the path that suits the call, the
// memory and the topology (choose_path.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "engine/collective/fabric.h"
#include "engine/collective/handshake.h"
#include "engine/core/operation.h"
#include "engine/core/task.h"
#include "engine/links/trial.h"

namespace dcoll {

// The whole collective, from its beginning or from `entry` on.
Task run_collective(Fabric& fabric, Operation& operation, Entry entry = {});

// Once, before anything else on a board: where everybody's slots are, and whether all ranks can read each other's
// memory.
Task learn_slots(Fabric& fabric);

// After a call that a trial of two ways has had made. Once it is done: `medians`, in us per byte, of the one way and of
// the other; the mean over all ranks, for what counts is how long calls take on all of them.
Task note_call(Fabric& fabric, Trial& trial, size_t bytes, int64_t begin_ns, std::array<double, 2>& medians);

}  // namespace dcoll
