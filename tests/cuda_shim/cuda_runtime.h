// As much of CUDA as the kernels use, on the CPU, so that the .cu files compile as C++ and run under sanitizers
// (block.h). Streams do everything at once.
#pragma once

#include <cmath>
#include <cstring>
#include <set>

#include "cuda_shim/block.h"

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __shared__ static
#define __launch_bounds__(...)

// ---- types ----

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
using cudaStream_t = struct CUstream_st*;

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
enum cudaMemcpyKind { cudaMemcpyDefault };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
struct cudaDeviceProp {
  char name[16];
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

// ---- what a kernel sees of its place, and of the other threads ----

// References, because the names are CUDA's and the variables change with the fiber.
inline const cuda_shim::Index &threadIdx = cuda_shim::thread_index, &blockIdx = cuda_shim::block_index,
                              &blockDim = cuda_shim::block_dim, &gridDim = cuda_shim::grid_dim;

inline void __syncthreads() { cuda_shim::block().wait_for_all(); }

namespace cuda_shim {
template <class T>
const uint64_t* gather_all(unsigned mask, T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  if (mask != ~0u) die("only collectives of whole warps are known");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  return block().gather(bits);
}
template <class T>
T value_of(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
}  // namespace cuda_shim

inline void __syncwarp(unsigned mask = ~0u) { cuda_shim::gather_all(mask, 0); }
template <class T>
T __shfl_sync(unsigned mask, T value, unsigned lane) {
  return cuda_shim::value_of<T>(cuda_shim::gather_all(mask, value)[lane % cuda_shim::kWarp]);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by) {
  const uint64_t* const all = cuda_shim::gather_all(mask, value);
  const unsigned lane = cuda_shim::block().lane();
  return lane < by ? value : cuda_shim::value_of<T>(all[lane - by]);
}
inline unsigned __ballot_sync(unsigned mask, bool vote) {
  const uint64_t* const all = cuda_shim::gather_all(mask, vote);
  unsigned votes = 0;
  for (unsigned lane = 0; lane < cuda_shim::kWarp; ++lane) votes |= static_cast<unsigned>(all[lane]) << lane;
  return votes;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  const uint64_t* const all = cuda_shim::gather_all(mask, value);
  uint64_t most = 0;
  for (unsigned lane = 0; lane < cuda_shim::kWarp; ++lane) most = all[lane] > most ? all[lane] : most;
  return static_cast<unsigned>(most);
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  const uint64_t* const all = cuda_shim::gather_all(mask, value);
  uint64_t sum = 0;
  for (unsigned lane = 0; lane < cuda_shim::kWarp; ++lane) sum += all[lane];
  return static_cast<unsigned>(sum);
}

// Blocks and threads run by turns, so nothing comes in between.
template <class T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at = static_cast<T>(before + value);
  return before;
}
template <class T>
T atomicMin(T* at, T value) {
  const T before = *at;
  *at = value < before ? value : before;
  return before;
}

// ---- arithmetic and memory ----

inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __double2float_rz(double x) {
  const auto nearest = static_cast<float>(x);
  return std::fabs(static_cast<double>(nearest)) > std::fabs(x) ? std::nextafter(nearest, 0.0f) : nearest;
}

template <class T>
void __stwb(T* at, T value) {
  if (reinterpret_cast<uintptr_t>(at) % alignof(T) != 0) cuda_shim::die("a misaligned store");
  *at = value;
}

// ---- the runtime ----

inline cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(dst, src, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* dst, int byte, size_t bytes, cudaStream_t) {
  std::memset(dst, byte, bytes);
  return cudaSuccess;
}
namespace cuda_shim {
// A driver loads a kernel when it is first asked for or launched.
inline std::set<const void*> loaded;
}  // namespace cuda_shim
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... args) {
  cuda_shim::loaded.insert(reinterpret_cast<const void*>(kernel));
  cuda_shim::run_grid(config->gridDim.x, config->blockDim.x, [&] { kernel(static_cast<Parameters>(args)...); });
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorName(cudaError_t) { return "an error"; }
inline const char* cudaGetErrorString(cudaError_t) { return "of the shim"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
inline cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 0, cudaSuccess; }
inline cudaError_t cudaDriverGetVersion(int* version) { return *version = 0, cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  return std::strcpy(properties->name, "the CUDA shim"), cudaSuccess;
}
// So few blocks at once that small arrays take several rounds of the grid.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 3, cudaSuccess; }
struct cudaFuncAttributes {};
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel* kernel) {
  cuda_shim::loaded.insert(reinterpret_cast<const void*>(kernel));
  return cudaSuccess;
}
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int, size_t) {
  cuda_shim::loaded.insert(kernel);
  return *blocks = 1, cudaSuccess;
}
