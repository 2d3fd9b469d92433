// A transport and a window once more, for a second sequence of collectives over the same ranks: channels and a board of
// its own, but the same memory, messages, doorbell and failures. So it costs nothing to have, one wait sleeps on both
// sequences, and operands mapped for one are mapped for the other.
//
// The second board is looked at record by record also where the first has an arrival tree: a tree would need a second
// set of groups and of words to sleep on.
#pragma once

#include <memory>

#include "transport/transport.h"
#include "transport/window.h"

namespace dcoll {

// `main` must outlive it.
std::unique_ptr<Messages> make_lane(Messages& main);
std::shared_ptr<Window> make_lane(std::shared_ptr<Window> main);

}  // namespace dcoll
