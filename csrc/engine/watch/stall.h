// Who is to blame when nothing moves: a rank waits for its neighbours, which may themselves only wait for another.
#pragma once

#include <vector>

#include "base/clock.h"
#include "transport/transport.h"

namespace dcoll {

// Of all ranks that rank `own` or anybody else waits for, those that did not say themselves, since `since`, that they
// wait. When everybody said so (a link between two of them is down, not a rank), those this rank waits for. In
// ascending order, each once.
std::vector<int> culprits(int own, std::vector<int> waits_for, const std::vector<StallNote>& notes,
                          Clock::time_point since);

}  // namespace dcoll
