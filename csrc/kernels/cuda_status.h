// Is there a device, and did the last CUDA call succeed. No CUDA header is needed to include this.
#pragma once

#include <string>

namespace dcoll::kernels::cuda {

// How many devices the driver offers. 0, never an exception, where there is no driver or no device.
int device_count();
inline bool available() { return device_count() > 0; }
// Why available() is false, in CUDA's words ("CUDA driver version is insufficient for CUDA runtime version"); "" if
// true.
std::string unavailable_reason();
// Name of a device ("NVIDIA H200"). Throws ArgumentError for an index that does not exist.
std::string device_name(int device);
// CUDA's versions as CUDA counts (13000 is 13.0): of the runtime linked in, and the newest that the driver can serve (0
// where there is none).
int runtime_version();
int driver_version();

// Throws Error with CUDA's name and description of the status (a cudaError_t) unless it is cudaSuccess. `what` says
// what was being done.
void check(int status, const char* what);

// Makes a device the calling thread's current one, as kernels see it; until it ends, if it restores what was before.
class CurrentDevice {
 public:
  CurrentDevice(int device, bool restores);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool restores_;
};

// Streaming multiprocessors of the current device: grids are sized by it.
int multiprocessors();
// How many blocks of so many threads of a kernel (its address) one of them holds at once.
int resident_blocks(const void* kernel, int threads);

}  // namespace dcoll::kernels::cuda
