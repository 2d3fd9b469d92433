// join(): a rank whose data has ended lets the others go on. From then on it takes part in their all-reduces with the
// operator's neutral element (zeros for sum and average, which still divides by all ranks, as in Horovod), until every
// rank has joined.
//
// A join is an operation like any other, and stays at the front of its queue: in each round it enters the handshake
// with a fingerprint of its own. If all ranks do, all have joined. Otherwise the handshake fails, and the exchange that
// then tells every rank what the others called (mismatch.h) tells the joined ones what to take part in. So what ranks
// pay that have not joined is nothing while nobody has, and one more handshake and exchange per operation otherwise.
#pragma once

#include <cstddef>

#include "engine/collective/mismatch.h"
#include "engine/core/operation.h"
#include "engine/core/task.h"

namespace dcoll {

// Request::count of a join of one round: a joined rank's part in one operation that meets by name.
inline constexpr size_t kOneRound = 1;

// Rounds until all ranks have joined. The last one to join, of several the one with the highest number, is the
// operation's counts[0]. On a rank that others outlast, operation.note is logged once.
Task run_join(Fabric& fabric, Operation& operation);

// Whether a joined rank has something to bring to this all-reduce that does not change it.
bool has_neutral(const Called& call);
// A joined rank's part in an all-reduce of the others.
Task contribute_nothing(Fabric& fabric, Called call);
Task nothing_to_do();

}  // namespace dcoll
