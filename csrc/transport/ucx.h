// UCX, which carries messages between nodes where the job was started without MPI. Behind an interface, because the
// library that is linked with it (libdcoll_ucx.so) is loaded when it is needed: dcoll works where no UCX is installed.
// Only its own files (transport/ucx) include UCX's headers.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "transport/bootstrap.h"

namespace dcoll {

class Ucx {
 public:
  virtual ~Ucx() = default;
  virtual std::string library_version() const = 0;  // "UCX 1.22.0"
  // Collective over the job's ranks.
  virtual std::unique_ptr<Transport> make_transport(Bootstrap& job, size_t max_message_bytes, int slots,
                                                    const std::string& tcp_congestion) = 0;
};

// The process's, loaded by the first call. Throws TransportError with the cause and the remedy.
Ucx& ucx();

// The plugin's only exported symbol. What it returns lives for ever.
inline constexpr const char* kUcxPluginEntry = "dcoll_ucx_v1";
using UcxPluginEntry = Ucx* (*)();

}  // namespace dcoll
