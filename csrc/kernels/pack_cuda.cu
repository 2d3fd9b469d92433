// The GPU twin of pack_cpu.cc: one launch copies a whole batch of segments.
//   1. The host cuts every segment into tiles and numbers the tiles through the batch.
//   2. A block takes one tile, finds its segment by bisection of the first tile numbers, and copies it, with the widest
//      accesses for which both addresses have a common boundary (16 bytes down to 1), several of them in flight.
// The descriptors are kernel parameters, so nothing is copied to the device beforehand, and nothing must be kept alive
// until the kernel has run. cub::DeviceMemcpy::Batched wants them in device memory, plus scratch memory, which costs
// more than the copying for the small tensors this is about.
#include <cuda_runtime.h>

#include "kernels/cuda.h"
#include "kernels/cuda_status.h"
#include "kernels/elements.cuh"

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

// Loads that a thread has under way before its first store.
constexpr unsigned kInFlight = 4;

// *dst = *src, or zeros where src is null, for `bytes` bytes, by one block. Both addresses lead to a multiple of
// sizeof(Unit) in the same number of bytes: what lies before and behind is copied byte by byte.
template <class Unit>
__device__ void copy_units(char* dst, const char* src, size_t bytes) {
  const size_t to_boundary = bytes_to_alignment(dst, sizeof(Unit));
  const size_t head = to_boundary < bytes ? to_boundary : bytes;
  const size_t units = (bytes - head) / sizeof(Unit);
  const size_t tail = head + units * sizeof(Unit);
  auto* to = reinterpret_cast<Unit*>(dst + head);
  if (src) {
    const auto* from = reinterpret_cast<const Unit*>(src + head);
#pragma unroll 1
    for (size_t i = threadIdx.x; i < units; i += kInFlight * kThreads) {
      Unit x[kInFlight];
#pragma unroll
      for (unsigned k = 0; k < kInFlight; ++k) {
        if (i + k * kThreads < units) x[k] = from[i + k * kThreads];
      }
#pragma unroll
      for (unsigned k = 0; k < kInFlight; ++k) {
        if (i + k * kThreads < units) to[i + k * kThreads] = x[k];
      }
    }
  } else {
    for (size_t i = threadIdx.x; i < units; i += kThreads) to[i] = Unit{};
  }
  for (size_t i = threadIdx.x; i < head + bytes - tail; i += kThreads) {
    const size_t at = i < head ? i : tail + i - head;
    dst[at] = src ? src[at] : 0;
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
  char* dst = copy.dst + begin;
  const char* src = copy.src ? copy.src + begin : nullptr;
  // The lowest bit in which the addresses differ is what they can at most be aligned to both.
  const auto apart = src ? reinterpret_cast<uintptr_t>(dst) ^ reinterpret_cast<uintptr_t>(src) : 0;
  if (apart % 16 == 0) {
    copy_units<uint4>(dst, src, end - begin);
  } else if (apart % 8 == 0) {
    copy_units<uint2>(dst, src, end - begin);
  } else if (apart % 4 == 0) {
    copy_units<unsigned>(dst, src, end - begin);
  } else if (apart % 2 == 0) {
    copy_units<unsigned short>(dst, src, end - begin);
  } else {
    copy_units<unsigned char>(dst, src, end - begin);
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
    launch_kernel<&copy_kernel>(tiles_, stream_, "launching pack", batch_);
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
