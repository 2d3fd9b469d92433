// A collective as messages, in the order that a schedule of plan/ gives.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/collective/fabric.h"
#include "engine/core/operation.h"
#include "engine/core/task.h"

namespace dcoll {

// Whether it is to be measured how fast this call's codec is, so that it is known whether it pays.
bool wants_coding(const Fabric& fabric, const Call& call);

// Whether the constants of the cost model are wanted for this call, which is the first then.
bool wants_constants(const Fabric& fabric, const Call& call);

// Of an all-gather or all-to-all, whose handshake is done: how many rows come from each rank, in `operation.counts`.
Task exchange_counts(Fabric& fabric, Operation& operation);
// Each in bytes. TransportError: more than there can be, with the rank that told of it.
std::vector<size_t> bytes_of_rows(const std::vector<int64_t>& counts, size_t row_bytes);

// What follows the handshake. `operation.counts` are exchanged unless they are there. `cost`: of encoding.
Task move_by_schedule(Fabric& fabric, Operation& operation, EncodedCost& cost);

}  // namespace dcoll
