// What two ranks say to each other about point-to-point messages, on a channel of their own (kPointChannel).
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/node/peer_memory.h"
#include "transport/window.h"

namespace dcoll {

// In front of everything that is said. 24 bytes, so that as many of a small message lie on the same cache line.
struct PointMessage {
  enum class What : uint32_t {
    kEager = 1,  // the message itself follows
    kOffer,      // an Offer follows: a large message lies there and stays until kDone, or until it is sent in slices
    kAsk,        // the receiver cannot read what was offered: send it in slices (kPointDataChannel)
    kDone,       // the receiver has read what was offered
    kTooLong,    // the receiver has no room for it. What was sent follows, 8 bytes
    kShare,      // a PointShare follows: the sender may write a part of what was offered, while it waits
    kWritten,    // the sender has written its part: for who sleeps; the shared word says it
    kWaits,      // the sender has waited long for this rank, and wants to hear should it leave
    kLeaves,     // the sender has left: it sends nothing any more, or, with an id, takes nothing. Why follows, or not
  };
  What what{};
  uint32_t id = 0;     // kOffer: a number of the sender's; the others: of the offer, 0: it was eager, or there is none
  uint64_t key = 0;    // which receives it meets (core/point.h)
  uint64_t bytes = 0;  // of the message; kTooLong: for which the receiver has room
};
static_assert(sizeof(PointMessage) == 24);

struct PointOffer {
  uint64_t offset = kUnmappedOffset;  // in the sender's arena, if it lies there
  uint64_t address = 0;               // in the sender's process
  Introduction who;                   // whom to read from there
};

struct PointShare {
  uint64_t pieces = 0;   // a SharedPieces in the receiver's arena: where,
  uint64_t message = 0;  // and for which message it is
  uint64_t address = 0;  // in the receiver's process, of the memory to write to
  Introduction who;      // whom to write to
};

}  // namespace dcoll
