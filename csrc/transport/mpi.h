// MPI, behind an interface, because the library that implements it (libdcoll_mpi.so) is loaded at run time: dcoll works
// where no MPI is installed, and the core never links one. Only its own files (transport/mpi) include
// <mpi.h>.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "transport/start_up.h"
#include "transport/transport.h"

namespace dcoll {

class MpiBackend {
 public:
  virtual ~MpiBackend() = default;  // frees the duplicated communicator; does not finalize MPI

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string library_version() const = 0;  // first line of MPI_Get_library_version
  virtual std::string library_path() const = 0;     // file that MPI_Init comes from (dladdr)
  virtual int thread_level() const = 0;             // MPI_THREAD_SINGLE .. MULTIPLE as 0 .. 3
  virtual std::string processor_name() const = 0;

  // Start-up, over the backend's own communicator. Each waits for the other ranks no longer than StartUp says, and
  // throws what keeps them away. Collective over all ranks; before the exchanges, and again for every communicator.
  virtual void meet(const StartUp& start) = 0;
  // This rank takes no part in the exchanges that the others still wait for; they throw PeerError with its words.
  virtual void leave(const std::string& why) noexcept = 0;
  virtual void broadcast(void* data, size_t bytes, int root) = 0;
  virtual std::vector<std::byte> all_gather(const void* data, size_t bytes) = 0;  // size() * bytes, in rank order
  virtual std::vector<int>
  node_of_ranks() = 0;  // per rank: node index, by MPI_Comm_split_type(SHARED), numbered by lowest rank
  virtual void barrier() = 0;

  // MPI for some of the ranks, this one among them; collective over these alone. It may outlive this backend.
  virtual std::unique_ptr<MpiBackend> subset(const std::vector<int>& ranks) = 0;

  // Point-to-point over a communicator of its own (MPI_Comm_dup), tag = channel. tcp_congestion: see tcp_congestion.h.
  virtual std::unique_ptr<Transport> make_transport(size_t max_message_bytes, int slots,
                                                    const std::string& tcp_congestion) = 0;

  // MPI_Finalize, if this backend initialised MPI and it is not finalized yet. Blocking, collective.
  virtual void finalize() = 0;
  // MPI_Abort on the world: ends every rank of the job.
  [[noreturn]] virtual void abort(int exit_code) = 0;
};

// dlopens the plugin and initialises MPI (MPI_THREAD_MULTIPLE asked for) unless it is initialised already. Requires at
// least MPI_THREAD_SERIALIZED. Throws TransportError with dlerror() and the remedy; TimeoutError when other ranks did
// not come, who may be waited for by calling it again.
std::unique_ptr<MpiBackend> load_mpi(const std::string& plugin_path, const StartUp& start);

// The plugin's only exported symbol.
inline constexpr const char* kMpiPluginEntry = "dcoll_mpi_backend_v2";
using MpiPluginEntry = MpiBackend* (*)(const StartUp&);

}  // namespace dcoll
