// The GPU twin of sum_top in topk_cpu.cc:
//   1. starts: a block of threads for each message adds up its counts, so that any part of it can be found.
//   2. sum: a block of threads for each part of the result, which is added up in shared memory, message after message,
//      and written once. It looks at the places of all of its message's block, which are few beside the result.
#include <cuda_runtime.h>

#include <cmath>
#include <string>

#include "base/error.h"
#include "kernels/cuda.h"
#include "kernels/elements.cuh"
#include "kernels/float_bits.cuh"
#include "kernels/scale.h"
#include "kernels/warp.cuh"

namespace dcoll::kernels::cuda {
namespace {

constexpr unsigned kBlock = 1 << 16, kPart = 1 << 13, kQuad = 4;

struct Messages {
  const char* at[kMaxPointers];
  unsigned size;
  size_t count, k;
  unsigned *starts, *first_bad;  // n_blocks() + 1 of each message

  __host__ __device__ size_t n_blocks() const { return (count + kBlock - 1) / kBlock; }
  __device__ const unsigned* counts(unsigned m) const { return reinterpret_cast<const unsigned*>(at[m]); }
  __device__ const uint16_t* places(unsigned m) const {
    return reinterpret_cast<const uint16_t*>(counts(m) + n_blocks());
  }
  __device__ const float* values(unsigned m) const {
    return reinterpret_cast<const float*>(places(m) + (2 * k + 3) / 4 * 2);
  }
  __device__ unsigned* starts_of(unsigned m) const { return starts + m * (n_blocks() + 1); }
};

__global__ void __launch_bounds__(kThreads) starts_kernel(const __grid_constant__ Messages messages) {
  const size_t n = messages.n_blocks();
  for (unsigned m = blockIdx.x; m < messages.size; m += gridDim.x) {
    unsigned* const starts = messages.starts_of(m);
    unsigned long long before = 0;
    for (size_t begin = 0; begin < n; begin += kThreads) {
      const size_t block = begin + threadIdx.x;
      unsigned long long total;
      const unsigned long long here = block_scan(block < n ? messages.counts(m)[block] : 0, total);
      if (block < n) starts[block] = static_cast<unsigned>(before + here);
      before += total;
    }
    if (before <= messages.k) {
      if (threadIdx.x == 0) starts[n] = static_cast<unsigned>(before);
      continue;
    }
    // No encode_top made it: nothing of it is looked at.
    __syncthreads();
    for (size_t block = threadIdx.x; block <= n; block += kThreads) starts[block] = 0;
    if (threadIdx.x == 0) atomicMin(messages.first_bad, m);
  }
}

__global__ void __launch_bounds__(kThreads)
    sum_kernel(float* dst, const __grid_constant__ Messages messages, float of_each, Scale scale, bool aligned) {
  __shared__ Pack<float, kQuad> quads[kPart / kQuad];
  float* const sums = quads[0].v;
  for (size_t begin = static_cast<size_t>(blockIdx.x) * kPart; begin < messages.count;
       begin += static_cast<size_t>(gridDim.x) * kPart) {
    const size_t block = begin / kBlock, left = messages.count - begin, left_of_block = messages.count - block * kBlock;
    const unsigned length = left_of_block < kBlock ? static_cast<unsigned>(left_of_block) : kBlock;
    const unsigned n = left < kPart ? static_cast<unsigned>(left) : kPart;
    for (unsigned i = threadIdx.x; i < kPart / kQuad; i += kThreads) quads[i] = {};
    for (unsigned m = 0; m < messages.size; ++m) {
      __syncthreads();  // sums are in the order of messages
      const unsigned end = messages.starts_of(m)[block + 1];
      for (unsigned i = messages.starts_of(m)[block] + threadIdx.x; i < end; i += kThreads) {
        const unsigned place = messages.places(m)[i], in_part = place - static_cast<unsigned>(begin % kBlock);
        if (place >= length) atomicMin(messages.first_bad, m);
        if (in_part < n) sums[in_part] = add(sums[in_part], multiply(messages.values(m)[i], of_each));
      }
    }
    __syncthreads();
    for (unsigned i = threadIdx.x * kQuad; i < n; i += kThreads * kQuad) {
      Pack<float, kQuad> quad = quads[i / kQuad];
#pragma unroll
      for (unsigned e = 0; e < kQuad; ++e) quad.v[e] = scaled_bits(quad.v[e], scale);
      if (aligned && i + kQuad <= n) {
        store_pack(dst + begin + i, quad);
      } else {
        for (unsigned e = 0; e < kQuad && i + e < n; ++e) dst[begin + i + e] = quad.v[e];
      }
    }
    __syncthreads();
  }
}

}  // namespace

size_t sum_top_scratch(size_t count, size_t messages) {
  return messages * ((count + kBlock - 1) / kBlock + 1) * sizeof(unsigned);
}

void sum_top(float* dst, std::span<const void* const> messages, size_t count, size_t k, double factor, void* scratch,
             unsigned* first_bad, void* stream) {
  if (count >> 32 != 0 || messages.empty() || messages.size() > kMaxPointers) {
    throw ArgumentError("the sum of top-k messages on the GPU takes 1 to " + std::to_string(kMaxPointers) +
                        " of them, of less than 2^32 elements (got " + std::to_string(messages.size()) + " of " +
                        std::to_string(count) + ")");
  }
  if (count == 0) return;
  Messages all;
  all.size = static_cast<unsigned>(messages.size());
  all.count = count;
  all.k = k;
  all.starts = static_cast<unsigned*>(scratch);
  all.first_bad = first_bad;
  for (unsigned m = 0; m < all.size; ++m) {
    all.at[m] = static_cast<const char*>(messages[m]);
    if (bytes_to_alignment(all.at[m], 4) != 0) {
      throw ArgumentError("top-k messages on the GPU begin at a multiple of 4 bytes; message " + std::to_string(m) +
                          " does not");
    }
  }
  // As on the CPU: a power of two multiplies values, anything else their sum.
  int exponent;
  const bool each = std::frexp(factor, &exponent) == 0.5;
  const Scale scale = prepare_scale(DType::kFloat32, each ? 1.0 : factor);
  const auto on = static_cast<cudaStream_t>(stream);
  launch_kernel<&starts_kernel>(all.size, on, "launching the sum of top-k messages", all);
  const unsigned blocks = blocks_for<&sum_kernel>((count + kPart - 1) / kPart * kThreads);
  launch_kernel<&sum_kernel>(blocks, on, "launching the sum of top-k messages", dst, all,
                             static_cast<float>(each ? factor : 1.0), scale,
                             bytes_to_alignment(dst, kVectorBytes) == 0);
}

}  // namespace dcoll::kernels::cuda
