#include <cuda_runtime.h>

#include "base/error.h"
#include "kernels/cuda_status.h"

namespace dcoll::kernels::cuda {

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  (void)cudaGetLastError();  // "no driver" would otherwise be reported by the next call's check
  return 0;
}

std::string unavailable_reason() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  if (status != cudaSuccess) return cudaGetErrorString(status);
  return count > 0 ? "" : "the driver offers no device";
}

std::string device_name(int device) {
  const int count = device_count();
  if (device < 0 || device >= count) {
    throw ArgumentError("no CUDA device " + std::to_string(device) + ": " + std::to_string(count) +
                        " available; allowed are 0 <= device < count");
  }
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device), "asking for the device's name");
  return properties.name;
}

int runtime_version() {
  int version = 0;
  check(cudaRuntimeGetVersion(&version), "asking for the runtime's version");
  return version;
}

int driver_version() {
  int version = 0;
  check(cudaDriverGetVersion(&version), "asking for the driver's version");
  return version;
}

void check(int status, const char* what) {
  const auto error = static_cast<cudaError_t>(status);
  if (error == cudaSuccess) return;
  throw Error(std::string("CUDA failed ") + what + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error));
}

CurrentDevice::CurrentDevice(int device, bool restores) : restores_(restores) {
  check(cudaGetDevice(&before_), "asking for the current device");
  check(cudaSetDevice(device), "changing the current device");
}

CurrentDevice::~CurrentDevice() {
  if (restores_) (void)cudaSetDevice(before_);
}

int multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "asking for the current device");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "asking for its multiprocessors");
  return count;
}

int resident_blocks(const void* kernel, int threads) {
  int blocks = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, 0), "asking how many blocks fit");
  return blocks;
}

}  // namespace dcoll::kernels::cuda
