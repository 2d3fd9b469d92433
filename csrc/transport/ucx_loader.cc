#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>

#include "base/error.h"
#include "base/thread_safety.h"
#include "transport/ucx.h"

namespace dcoll {
namespace {

constexpr const char* kWhy =
    "The job was started without MPI, and some of its ranks share no memory (other nodes, other containers, "
    "DCOLL_TRANSPORT=mpi). Between them dcoll needs UCX, but ";
constexpr const char* kRemedy =
    ". On every node: `pip install libucx-cu12`, then install dcoll again with DCOLL_UCX=1. Or start the job with "
    "mpirun";

// Beside the core, in the package's folder.
std::string plugin_path() {
  Dl_info core{};
  if (dladdr(reinterpret_cast<const void*>(&ucx), &core) == 0 || core.dli_fname == nullptr) return "libdcoll_ucx.so";
  const std::string path = core.dli_fname;
  return path.substr(0, path.rfind('/') + 1) + "libdcoll_ucx.so";
}

// Read by UCX as it is loaded. It would take over the process's signals for its own back traces, and hook the
// allocation of memory, which only registered memory of network adapters needs, and forked children suffer from.
void set_defaults() {
  setenv("UCX_HANDLE_ERRORS", "none", /*overwrite=*/0);
  setenv("UCX_WARN_UNUSED_ENV_VARS", "n", 0);
}

Ucx* load() {
  const std::string path = plugin_path();
  if (access(path.c_str(), R_OK) != 0) {
    throw TransportError(std::string(kWhy) + "dcoll was built without it (" + path + " does not exist)" + kRemedy);
  }
  set_defaults();
  void* plugin = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (plugin == nullptr) {
    const char* cause = dlerror();
    throw TransportError(std::string(kWhy) + "its library could not be loaded: " + (cause ? cause : "unknown cause") +
                         kRemedy);
  }
  void* entry = dlsym(plugin, kUcxPluginEntry);
  if (entry == nullptr) {
    throw TransportError(path + " has no entry " + kUcxPluginEntry +
                         ": it belongs to another version of dcoll. Reinstall dcoll");
  }
  return reinterpret_cast<UcxPluginEntry>(entry)();
}

}  // namespace

Ucx& ucx() {
  static Mutex mutex;
  static Ucx* loaded = nullptr;
  const MutexLock lock(mutex);
  if (loaded == nullptr) loaded = load();
  return *loaded;
}

}  // namespace dcoll
