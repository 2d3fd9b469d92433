// Other ways to start a communicator's collectives: what Python calls comm.by_name starts operations that meet by name,
// OnDevice(comm, device) those of a communicator or of its by_name for addresses on that device.
#pragma once

#include <memory>

#include "engine/communicator/communicator.h"

namespace dcoll::bind {

using CommPtr = std::shared_ptr<Communicator>;

struct OnDevice {
  CommPtr comm;
  bool by_name = false;
  int device = device::kHost;
};

// Begins after what is in the caller's current stream.
std::shared_ptr<Operation> submit(const OnDevice& self, Request request);

// Of an operation on any memory that is done. Whether its memory is as it should be; never throws.
bool settled(Operation& operation) noexcept;
// The caller's current stream waits for that, or the caller where streams are the emulated device's. What the device
// has against it fails the communicator, so that the other ranks hear of it.
void settle(Communicator& comm, Operation& operation);
// The caller waits for that.
void wait_settled(Operation& operation) noexcept;
// wait_interruptibly(), and settle() whatever became of the operation.
void wait_all(Communicator& comm, Operation& operation, double timeout_s, Spin spin = Spin::kAllowed);
// The same without a limit, for a call from Python that was given addresses. Where it throws and the core still works
// on that memory, as after Ctrl-C, what the caller has as variables is never freed.
void wait_keeping_memory(Communicator& comm, Operation& operation);

}  // namespace dcoll::bind
