#include "transport/mpi/libfabric.h"

#include <dlfcn.h>

#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "transport/mpi/requests.h"

namespace dcoll::mpi {

#ifdef OPEN_MPI

namespace {

namespace fs = std::filesystem;

// InfiniBand, RoCE, Omni-Path and EFA are of the first class, Slingshot is the second.
bool has_fabric() {
  for (const char* kind : {"/sys/class/infiniband", "/sys/class/cxi"}) {
    std::error_code none;
    if (fs::directory_iterator(kind, none) != fs::directory_iterator()) return true;
  }
  return false;
}

bool names_btls(const fs::path& settings) {
  std::ifstream file(settings);
  for (std::string line; std::getline(file, line);) {
    std::erase_if(line, [](unsigned char c) { return std::isspace(c) != 0; });
    if (line.starts_with("btl=")) return true;
  }
  return false;
}

}  // namespace

void leave_out_libfabric() {
  for (const char* name : {"OMPI_MCA_btl", "OMPI_MCA_mca_base_param_files"}) {
    if (std::getenv(name) != nullptr) return;
  }
  // A variable goes before these files. Debian's Open MPI has its file elsewhere, and leaves "ofi" out in it.
  Dl_info library{};
  if (has_fabric() || dladdr(reinterpret_cast<const void*>(&MPI_Init_thread), &library) == 0) return;
  const fs::path of_all = fs::path(library.dli_fname).parent_path().parent_path() / "etc/openmpi-mca-params.conf";
  const char* home = std::getenv("HOME");
  std::error_code none;
  if (!fs::exists(of_all, none) || names_btls(of_all)) return;
  if (home != nullptr && names_btls(fs::path(home) / ".openmpi/mca-params.conf")) return;
  setenv("OMPI_MCA_btl", "^ofi", /*overwrite=*/0);
}

#else

void leave_out_libfabric() {}

#endif

}  // namespace dcoll::mpi
