// What the threads of a warp and of a block find out together.
#pragma once

#include <cuda_runtime.h>

#include "kernels/elements.cuh"

namespace dcoll::kernels::cuda {

inline constexpr unsigned kAllLanes = ~0u, kWarp = 32, kWarps = kThreads / kWarp;

__device__ inline unsigned lane() { return threadIdx.x % kWarp; }
__device__ inline unsigned warp() { return threadIdx.x / kWarp; }
__device__ inline unsigned lanes_below() { return (1u << lane()) - 1; }

// The sum of the values of the threads before this one; `total`: of all. All threads of the block call it.
__device__ inline unsigned long long block_scan(unsigned long long value, unsigned long long& total) {
  __shared__ unsigned long long sums[kWarps];
  unsigned long long up_to = value;
#pragma unroll
  for (unsigned by = 1; by < kWarp; by *= 2) {
    const unsigned long long before = __shfl_up_sync(kAllLanes, up_to, by);
    if (lane() >= by) up_to += before;
  }
  if (lane() == kWarp - 1) sums[warp()] = up_to;
  __syncthreads();
  unsigned long long before = 0;
  total = 0;
  for (unsigned w = 0; w < kWarps; ++w) {
    if (w < warp()) before += sums[w];
    total += sums[w];
  }
  __syncthreads();  // the next call writes there
  return before + up_to - value;
}

}  // namespace dcoll::kernels::cuda
