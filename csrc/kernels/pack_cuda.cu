// The GPU twin of pack_cpu.cc: one launch copies a whole batch of segments.
//   1. The host cuts every segment into tiles and numbers the tiles through the batch.
//   2. A block takes one tile, finds its segment by bisection of the first tile numbers, and copies it, with the widest
//      accesses that both addresses allow (16 bytes down to 1).
// The descriptors are kernel parameters, so nothing is copied to the device beforehand, and nothing must be kept alive
// until the kernel has run. cub::DeviceMemcpy::Batched wants them in device memory, plus scratch memory, which costs
// more than the copying for the small tensors this is about.
#include <cuda_runtime.h>

#include "kernels/cuda_status.h"
#include "kernels/elements.cuh"
#include "kernels/pack_cuda.h"

namespace dcoll::kernels::cuda {
namespace {

constexpr size_t kTileBytes = 32 * 1024;
constexpr unsigned kBatch = 96;

struct Copy {
  char* dst;
  const char* src;  // null: zeros
  size_t bytes;
};
struct Batch {
  Copy copies[kBatch];
  unsigned first_tile[kBatch + 1];
  unsigned size;
};
static_assert(sizeof(Batch) <= 4000, "kernel parameters are limited to 4 KiB");

// Copies by one block; `begin` is a multiple of 16, both addresses of sizeof(Unit).
template <class Unit>
__device__ void copy_units(const Copy& copy, size_t begin, size_t end) {
  const size_t units = (end - begin) / sizeof(Unit);
  auto* dst = reinterpret_cast<Unit*>(copy.dst + begin);
  if (copy.src) {
    const auto* src = reinterpret_cast<const Unit*>(copy.src + begin);
    for (size_t i = threadIdx.x; i < units; i += blockDim.x) dst[i] = src[i];
  } else {
    for (size_t i = threadIdx.x; i < units; i += blockDim.x) dst[i] = Unit{};
  }
  for (size_t i = begin + units * sizeof(Unit) + threadIdx.x; i < end; i += blockDim.x) {
    copy.dst[i] = copy.src ? copy.src[i] : 0;
  }
}

__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ Batch batch) {
  unsigned low = 0, high = batch.size;  // the last copy whose first tile is not after this block's
  while (high - low > 1) {
    const unsigned middle = (low + high) / 2;
    if (batch.first_tile[middle] <= blockIdx.x) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const Copy copy = batch.copies[low];
  const size_t begin = (blockIdx.x - batch.first_tile[low]) * kTileBytes;
  const size_t end = begin + kTileBytes < copy.bytes ? begin + kTileBytes : copy.bytes;
  const auto misaligned = reinterpret_cast<uintptr_t>(copy.dst) | reinterpret_cast<uintptr_t>(copy.src);
  if (misaligned % 16 == 0) {
    copy_units<uint4>(copy, begin, end);
  } else if (misaligned % 8 == 0) {
    copy_units<uint2>(copy, begin, end);
  } else if (misaligned % 4 == 0) {
    copy_units<unsigned>(copy, begin, end);
  } else if (misaligned % 2 == 0) {
    copy_units<unsigned short>(copy, begin, end);
  } else {
    copy_units<unsigned char>(copy, begin, end);
  }
}

class Batcher {
 public:
  explicit Batcher(void* stream) : stream_(static_cast<cudaStream_t>(stream)) {}

  // Copies longer than a grid's 2^31 blocks would be 64 TiB: no memory is that large.
  void add(char* dst, const char* src, size_t bytes) {
    if (bytes == 0 || dst == src) return;
    batch_.copies[batch_.size] = {dst, src, bytes};
    batch_.first_tile[batch_.size++] = tiles_;
    tiles_ += static_cast<unsigned>((bytes + kTileBytes - 1) / kTileBytes);
    if (batch_.size == kBatch) flush();
  }
  void flush() {
    if (batch_.size == 0) return;
    batch_.first_tile[batch_.size] = tiles_;
    copy_kernel<<<tiles_, kThreads, 0, stream_>>>(batch_);
    check_launch("launching pack");
    batch_.size = 0;
    tiles_ = 0;
  }

 private:
  cudaStream_t stream_;
  Batch batch_{};
  unsigned tiles_ = 0;
};

}  // namespace

void pack(void* flat, std::span<const Segment> segments, void* stream) {
  Batcher batcher(stream);
  for (const Segment& s : segments) {
    batcher.add(static_cast<char*>(flat) + s.offset_bytes, static_cast<const char*>(s.tensor), s.bytes);
  }
  batcher.flush();
}

void unpack(std::span<const Segment> segments, const void* flat, void* stream) {
  Batcher batcher(stream);
  for (const Segment& s : segments) {
    if (s.tensor) batcher.add(static_cast<char*>(s.tensor), static_cast<const char*>(flat) + s.offset_bytes, s.bytes);
  }
  batcher.flush();
}

}  // namespace dcoll::kernels::cuda
