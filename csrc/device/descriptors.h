// Memory of a device that another process opens by a file descriptor, of which a handle says where it is to be had.
//
// A thread of the process that shows descriptors listens at an abstract Unix socket, and passes them (SCM_RIGHTS) to
// processes of the same user. pidfd_getfd() would need no thread, but the right to trace that process, which Yama and
// containers deny among ranks; nor can descriptors of NVIDIA's driver be opened through /proc. The sockets that are
// left of the ranks' handshake have no thread, and no room for all that a rank may show before others take it.
#pragma once

#include <cstddef>
#include <string>

#include "device/device.h"
#include "transport/os/fd.h"

namespace dcoll::device {

// The functions throw DeviceError, which begins with `whose`. From now on others can take the descriptor.
Handle show_descriptor(const std::string& whose, Fd descriptor, size_t bytes);
void hide_descriptor(const Handle& handle) noexcept;

// Else it is one of CUDA IPC's.
bool has_descriptor(const Handle& handle);
// For messages.
inline const char* way_of(const Handle& handle) { return has_descriptor(handle) ? "file descriptors" : "CUDA IPC"; }

struct Taken {
  Fd descriptor;
  size_t bytes;
};
Taken take_descriptor(const std::string& whose, const Handle& handle);

}  // namespace dcoll::device
