// Collectives on memory of a device. What NCCL has goes by it, where each rank has a GPU of its own (by_nccl.h).
// Between ranks whose devices reach each other's memory they stay there; everything else goes through the host
// (core/staging.h). What a rank does on its device is in device_work.h:
//
//   all-reduce of  how                                                                                       barriers
//   up to 64 KiB   copied into memory that the others read; each rank reduces all of it into its result      1
//   more           where all operands and results are in such memory (dcoll.empty, buckets), in place:
//                  rank r reduces slice r of all operands and writes it to all results (node/two_shot.h)     2
//   more           otherwise, in slices of 32 MiB, copied there and back                                     2 a slice
//
// The other collectives are pulls (node/pull.h): each rank takes, or reduces, what is meant for it out of all operands.
// Small ones and slices as above, with as many barriers; in place where the operand is in such memory.
//
// No stream waits for another process: the host asks whether the device is done, and only then posts on the board.
// Events of other processes (cudaIpcOpenEventHandle) would take the host out of that way; but a process that died would
// leave the program's own streams waiting for ever, which no deadline ends.
#pragma once

#include <string>

#include "engine/collective/fabric.h"
#include "engine/core/operation.h"
#include "engine/core/task.h"

namespace dcoll {

// Whether this call may; the same on every rank. Whether it does, ranks agree on when its turn has come.
bool may_stay_on_device(const Call& call);
// As far as is known by now.
bool stays_on_device(const Fabric& fabric, const Call& call);

Task on_device(Fabric& fabric, Operation& operation);

// As on_device(), without NCCL.
Task without_nccl(Fabric& fabric, Operation& operation);
// Once: why this rank cannot take part otherwise in a call, which goes through the host on all ranks.
void tell_of_host(Fabric& fabric, const std::string& why);
// Through the host, whatever it was to be before.
Task by_host(Fabric& fabric, Operation& operation);

}  // namespace dcoll
