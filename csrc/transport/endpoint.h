// What connecting to a set of peers yields: a way to send messages, and (mapped media only) the peers' memory.
#pragma once

#include <cstddef>
#include <memory>

#include "transport/transport.h"
#include "transport/window.h"

namespace dcoll {

struct Endpoint {
  std::unique_ptr<Transport> transport;
  std::shared_ptr<Window> window;  // null where memory is not shared. Outlives buffers that were allocated from it.
};

struct MappedOptions {
  size_t arena_bytes = size_t{1} << 30;  // address space per rank; pages are taken only when touched
  size_t slot_bytes = 64 << 10;          // the longest message
  int slots = 4;                         // per (peer, channel)
  int flat_ranks = 8;                    // more ranks than this arrive at the board by a tree (arrival_tree.h)
};

}  // namespace dcoll
