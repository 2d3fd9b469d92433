// The MPI job that a test under mpirun is a rank of.
#pragma once

#include <cstdlib>
#include <string>

#include "transport/mpi.h"

namespace dcoll {

inline std::string plugin_path() {
  const char* path = std::getenv("DCOLL_TEST_MPI_PLUGIN");
#ifdef DCOLL_TEST_MPI_PLUGIN
  if (path == nullptr) path = DCOLL_TEST_MPI_PLUGIN;
#endif
  return path ? path : "";
}

inline MpiBackend& mpi() {
  static MpiBackend* backend = [] {
    MpiBackend* made = load_mpi(plugin_path(), StartUp()).release();  // main() finalizes it; it is used until then
    made->meet(StartUp());
    return made;
  }();
  return *backend;
}

}  // namespace dcoll
