// What the files of the plugin (libdcoll_mpi.so) share with each other, and with nobody else.
#pragma once

#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1  // the C++ bindings that MPI 3 removed would add a library to link
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>

#include <memory>
#include <string>

#include "transport/transport.h"

namespace dcoll::mpi {

// Throws TransportError("<what> failed: <the library's own words>") unless code is MPI_SUCCESS.
void check_mpi(int code, const std::string& what);

// Collective over `parent`, which is duplicated and must return errors (MPI_ERRORS_RETURN).
std::unique_ptr<Transport> make_mpi_transport(MPI_Comm parent, size_t max_message_bytes, int slots,
                                              const std::string& tcp_congestion);

// Ends what the transports still open have outstanding, so that MPI_Finalize has nothing of ours to wait for.
void close_mpi_transports();

}  // namespace dcoll::mpi
