// MPI, behind an interface, because the library that implements it (libdcoll_mpi.so) is loaded at run time: dcoll works
// where no MPI is installed, and the core never links one. Only its own files (transport/mpi) include
// <mpi.h>.
#pragma once

#include <memory>
#include <string>

#include "transport/bootstrap.h"

namespace dcoll {

// Destroying it frees the duplicated communicator and does not finalize MPI. Nodes are told apart by
// MPI_Comm_split_type(SHARED). A transport has a communicator of its own (MPI_Comm_dup), tag = channel. finalize() is
// MPI_Finalize, if this backend initialised MPI and it is not finalized yet; abort() MPI_Abort on the world.
class MpiBackend : public Bootstrap {
 public:
  virtual std::string library_path() const = 0;  // file that MPI_Init comes from (dladdr)
  virtual int thread_level() const = 0;          // MPI_THREAD_SINGLE .. MULTIPLE as 0 .. 3
  const char* medium() const override { return "mpi"; }
  bool takes_threads() const override { return thread_level() == 3; }
};

// dlopens the plugin and initialises MPI (MPI_THREAD_MULTIPLE asked for) unless it is initialised already. Requires at
// least MPI_THREAD_SERIALIZED. Throws TransportError with dlerror() and the remedy; TimeoutError when other ranks did
// not come, who may be waited for by calling it again.
std::unique_ptr<MpiBackend> load_mpi(const std::string& plugin_path, const StartUp& start);

// The plugin's only exported symbol.
inline constexpr const char* kMpiPluginEntry = "dcoll_mpi_backend_v3";
using MpiPluginEntry = MpiBackend* (*)(const StartUp&);

}  // namespace dcoll
