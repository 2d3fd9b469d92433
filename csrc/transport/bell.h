// What a rank sleeps on while it waits for what peers of its node do to shared memory and for something else, which
// only a descriptor announces: a descriptor as well, an eventfd that the peers have too. They write to it as they would
// wake a futex, only while somebody is registered.
#pragma once

#include <cstdint>

#include "transport/os/fd.h"

namespace dcoll {

class Bell {
 public:
  virtual ~Bell() = default;
  // Readable once it was rung, until take_ring(). Non-blocking.
  virtual int descriptor() const = 0;
  // From here on whoever acts towards this rank rings, until end_wait(). False, and nobody is registered, when somebody
  // did so since the ticket was drawn (Transport::prepare_wait). Any thread.
  virtual bool begin_wait(uint32_t ticket) = 0;
  virtual void end_wait() = 0;
};

// An eventfd of its own. Throws TransportError when there is none to be had.
Fd make_bell();
void ring_bell(int descriptor);
// Makes it silent. Harmless when another thread did.
void take_ring(int descriptor);

}  // namespace dcoll
