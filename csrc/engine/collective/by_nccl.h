// Collectives on GPUs by NCCL (device/nccl.h), where each rank has a GPU of its own: all-reduce, broadcast, all-to-all,
// and all-gather and reduce-scatter of equal shares. Everything else goes as on_device.h says.
//
// NCCL's kernels wait for each other, so no rank may begin one that another does not: ranks agree on the call first, as
// for every collective, and on NCCL itself at the first one. Where a rank cannot take part in it this once (its tensor
// is on another GPU than before, or it has joined), all go through the host. Where one fails or dies, the others' part
// is aborted.
#pragma once

#include <cstdint>

#include "engine/collective/fabric.h"
#include "engine/core/operation.h"
#include "engine/core/task.h"

namespace dcoll {

// Whether NCCL has this collective; the same on every rank.
bool nccl_has(const Call& call, int size);
// Whether this call may, as far as is known by now; and whether it does, where it could stay in memory that ranks have
// opened as well. The same on every rank.
bool may_go_by_nccl(const Fabric& fabric, const Call& call);
bool goes_by_nccl(const Fabric& fabric, const Call& call);

Task by_nccl(Fabric& fabric, Operation& operation);

// After an all-reduce on devices, either way: it may have been one of those that are timed.
Task note_timed(Fabric& fabric, const Call& call, int64_t begin_ns);

}  // namespace dcoll
