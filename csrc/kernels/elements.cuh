// What the CUDA kernels share: 16-byte vectors of elements, conversion to the type computed in, and how many lead up to
// an aligned address.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda_status.h"

namespace dcoll::kernels::cuda {

inline constexpr int kThreads = 256;
inline constexpr size_t kVectorBytes = 16;  // the widest load a thread has

// N elements, loaded and stored as one.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T v[N];
};

// *to = pack, in one store; `to` lies in global memory and is aligned for it. Assigned instead, 16 bytes leave nvcc as
// a store per element (13.0; a uint4 and an __int128 likewise), four to eight times the instructions and partly filled
// sectors, so they are stored by an intrinsic that it does not take apart.
template <class T, int N>
__device__ void store_pack(T* to, const Pack<T, N>& pack) {
  if constexpr (sizeof(pack) == 16) {
    __stwb(reinterpret_cast<uint4*>(to), __builtin_bit_cast(uint4, pack));
  } else {
    *reinterpret_cast<Pack<T, N>*>(to) = pack;
  }
}

// The lane an element is computed in: float32 for 16-bit floats, the element's own type otherwise.
template <class T>
struct LaneOf {
  using Type = T;
};
template <>
struct LaneOf<__half> {
  using Type = float;
};
template <>
struct LaneOf<__nv_bfloat16> {
  using Type = float;
};
template <class T>
using Lane = typename LaneOf<T>::Type;

// float64 to float32, rounding to odd: towards zero, and the last bit set if that was inexact. Rounding the result once
// more, to 16 bits, then gives what rounding once would have (see narrow_double in simd_kernels.h).
__device__ inline float round_to_odd(double x) {
  const float toward_zero = __double2float_rz(x);
  const bool inexact = static_cast<double>(toward_zero) != x;
  return __int_as_float(__float_as_int(toward_zero) | (inexact ? 1 : 0));
}

template <class To, class From>
struct Convert {
  __device__ static To apply(From x) { return static_cast<To>(x); }
};
template <class To>
struct Convert<To, __half> {
  __device__ static To apply(__half x) { return Convert<To, float>::apply(__half2float(x)); }
};
template <class To>
struct Convert<To, __nv_bfloat16> {
  __device__ static To apply(__nv_bfloat16 x) { return Convert<To, float>::apply(__bfloat162float(x)); }
};
template <>
struct Convert<__half, float> {
  __device__ static __half apply(float x) { return __float2half_rn(x); }
};
template <>
struct Convert<__nv_bfloat16, float> {
  __device__ static __nv_bfloat16 apply(float x) { return __float2bfloat16_rn(x); }
};
template <>
struct Convert<__half, double> {
  __device__ static __half apply(double x) { return __float2half_rn(round_to_odd(x)); }
};
template <>
struct Convert<__nv_bfloat16, double> {
  __device__ static __nv_bfloat16 apply(double x) { return __float2bfloat16_rn(round_to_odd(x)); }
};

// How many bytes lead from `address` to a multiple of `alignment`, a power of two.
__host__ __device__ inline size_t bytes_to_alignment(const void* address, size_t alignment) {
  return -reinterpret_cast<uintptr_t>(address) & (alignment - 1);
}

// Blocks of kKernel for `work` threads: at most as many as the device holds at once, each thread striding over the
// rest; more would run when the first have ended, on a device half empty. How many a multiprocessor holds follows from
// the kernel's registers, and is asked once per kernel: devices of one process are alike, or some get a few blocks
// more.
template <auto* kKernel>
unsigned blocks_for(size_t work) {
  static const int per_multiprocessor = resident_blocks(reinterpret_cast<const void*>(kKernel), kThreads);
  const size_t wanted = (work + kThreads - 1) / kThreads;
  const size_t most = static_cast<size_t>(per_multiprocessor) * static_cast<size_t>(multiprocessors());
  return static_cast<unsigned>(wanted < 1 ? 1 : wanted < most ? wanted : most);
}

// Launches `blocks` blocks of kThreads of a kernel. Spelled as a call, which C++ without CUDA's <<< >>> compiles too:
// tests/cuda runs the kernels on the CPU.
template <auto* kKernel, class... Args>
void launch_kernel(unsigned blocks, cudaStream_t stream, const char* what, Args&&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim.x = blocks;
  config.blockDim.x = kThreads;
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kKernel, static_cast<Args&&>(args)...), what);
}

}  // namespace dcoll::kernels::cuda
