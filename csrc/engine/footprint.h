// The last operation that a rank finished, where its peers can read it though the rank itself is stopped: in its
// region. Written after every operation, so it is a few words to lines that nobody reads, and the time is the coarse
// clock's.
#pragma once

#include <string>

#include "engine/operation.h"
#include "transport/window.h"

namespace dcoll {

// By the owner, one thread at a time.
void leave_footprint(Footprint& footprint, const ReduceCall& call);
void leave_footprint(Footprint& footprint, const Request& request);

// Of two footprints of a rank, the later one.
const Footprint& later(const Footprint& a, const Footprint& b);

// "finished barrier 61 s ago", or "has finished no operation yet".
std::string read_footprint(const Footprint& footprint);

}  // namespace dcoll
