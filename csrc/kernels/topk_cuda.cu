// The GPU twin of encode_top in topk_cpu.cc. Two passes over memory, and some over the few elements that remain:
//   1. add_up: the feedback is brought up to date; a histogram in shared memory of the first 13 of each magnitude's 31
//      bits tells in which bin the k-th greatest is.
//   2. list: the elements of that bin and of those above it are listed, tile by tile, each tile's in order.
//   3. refine, twice: the next 9 bits of those in the bin, which tell the k-th greatest exactly.
//   4. count, scan: how many each tile sends, and how many those before it; of equal ones the first.
//   5. write: the listed elements that are sent go into the message, and leave the feedback.
// Where there is no room for the list, as when all elements are equal, steps 3 to 5 look at all elements instead.
// Nothing is known on the host meanwhile: each block finds the bin in the histogram by itself.
#include <cuda_runtime.h>

#include <string>

#include "base/error.h"
#include "kernels/cuda.h"
#include "kernels/elements.cuh"
#include "kernels/float_bits.cuh"
#include "kernels/scale.h"
#include "kernels/topk_work.cuh"
#include "kernels/warp.cuh"

namespace dcoll::kernels::cuda {
namespace {

// ---- 1. ----

// How many of `most` elements from `at` on there are.
__device__ unsigned at_most(unsigned most, size_t at, size_t count) {
  return at >= count ? 0 : count - at < most ? static_cast<unsigned>(count - at) : most;
}

__device__ Quad added_up(const Work& work, size_t at, unsigned n) {
  Quad x = load(work.src, at, n, work.aligned);
  if (work.velocity != nullptr) {
    const Quad velocity = load(work.velocity, at, n, work.aligned);
#pragma unroll
    for (unsigned i = 0; i < kQuad; ++i) x.x[i] = add(scaled_bits(velocity.x[i], work.momentum), x.x[i]);
    store(work.velocity, at, n, work.aligned, x);
  }
  if (work.error != nullptr) {
    const Quad error = load(work.error, at, n, work.aligned);
#pragma unroll
    for (unsigned i = 0; i < kQuad; ++i) x.x[i] = add(error.x[i], x.x[i]);
    store(work.error, at, n, work.aligned, x);
  }
  return x;
}

// Adds this block's bins, which lie in shared memory, to those of all.
__device__ void merge_bins(unsigned* all, const unsigned* bins, unsigned n) {
  __syncthreads();
  for (unsigned i = threadIdx.x; i < n; i += kThreads) {
    if (bins[i] > 0) atomicAdd(all + i, bins[i]);
  }
}
__device__ void clear_bins(unsigned* bins, unsigned n) {
  for (unsigned i = threadIdx.x; i < n; i += kThreads) bins[i] = 0;
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads) add_up_kernel(const __grid_constant__ Work work) {
  __shared__ unsigned bins[kBins<0>];
  clear_bins(bins, kBins<0>);
  const size_t first = (static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x) * kQuad;
  const size_t stride = static_cast<size_t>(gridDim.x) * kThreads * kQuad;
#pragma unroll 2
  for (size_t at = first; at < work.count; at += stride) {
    const unsigned n = at_most(kQuad, at, work.count);
    const Quad x = added_up(work, at, n);
#pragma unroll
    for (unsigned i = 0; i < kQuad; ++i) {
      if (i < n) atomicAdd(bins + (magnitude_bits(x.x[i]) >> kShift<0>), 1u);
    }
  }
  merge_bins(work.head->bins0, bins, kBins<0>);
}

// The bin of the k-th greatest, counted from the last bin down. Where the bins hold fewer than k, because zeros were
// not listed, the first. All threads of the block call it.
template <unsigned kDigit>
__device__ Found find(const unsigned* bins, Found before) {
  constexpr unsigned kEach = kBins<kDigit> / kThreads;
  __shared__ Found found;
  const unsigned last = kBins<kDigit> - 1 - threadIdx.x * kEach;
  Sum sum = 0, total;
  for (unsigned i = 0; i < kEach; ++i) sum += bins[last - i];
  Sum above = block_scan(sum, total);
  if (threadIdx.x == kThreads - 1 || (above < before.k && before.k <= above + sum)) {
    unsigned bin = last;
    if (above < before.k) {
      while (bin > last - (kEach - 1) && above + bins[bin] < before.k) above += bins[bin--];
      found = {before.bits * kBins<kDigit> + bin, static_cast<unsigned>(before.k - above)};
    }
  }
  __syncthreads();
  const Found result = found;
  __syncthreads();  // the next call writes there
  return result;
}

// ---- 2. ----

// Infinities are listed, whether sent or not, because they leave the feedback.
__device__ unsigned least_listed(Found found) {
  const unsigned least = found.bits << kShift<0>;
  return least == 0 ? 1 : least < kInfinityBits ? least : kInfinityBits;
}

// Writes this warp's part of a tile, x[q] being elements q * 128 + 4 * lane to + 3 of it, to the list from `to` on.
__device__ void list_part(const Quad (&x)[kQuads], size_t begin, unsigned least, Entry* to) {
#pragma unroll
  for (unsigned q = 0; q < kQuads; ++q) {
    unsigned before = 0, all = 0;
#pragma unroll
    for (unsigned i = 0; i < kQuad; ++i) {
      const unsigned votes = __ballot_sync(kAllLanes, magnitude_bits(x[q].x[i]) >= least);
      before += __popc(votes & lanes_below());
      all += __popc(votes);
    }
#pragma unroll
    for (unsigned i = 0; i < kQuad; ++i) {
      if (magnitude_bits(x[q].x[i]) < least) continue;
      const auto index = static_cast<unsigned>(begin + (q * kWarp + lane()) * kQuad + i);
      to[before++] = {index, __float_as_uint(x[q].x[i])};
    }
    to += all;
  }
}

__global__ void __launch_bounds__(kThreads) list_kernel(const __grid_constant__ Work work) {
  __shared__ unsigned of_warp[kWarps], start;
  const Found found = find<0>(work.head->bins0, {0, work.k});
  if (blockIdx.x == 0 && threadIdx.x == 0) work.head->found[0] = found;
  const unsigned least = least_listed(found);
  for (size_t tile = blockIdx.x; tile < work.n_tiles(); tile += gridDim.x) {
    const size_t begin = tile * kTile + warp() * kOfWarp;
    Quad x[kQuads];
    unsigned mine = 0;
#pragma unroll
    for (unsigned q = 0; q < kQuads; ++q) {
      const size_t at = begin + (q * kWarp + lane()) * kQuad;
      x[q] = load(work.values(), at, at_most(kQuad, at, work.count), work.aligned);  // zeros, which are not listed
#pragma unroll
      for (unsigned i = 0; i < kQuad; ++i) mine += magnitude_bits(x[q].x[i]) >= least;
    }
    mine = __reduce_add_sync(kAllLanes, mine);
    if (lane() == 0) of_warp[warp()] = mine;
    __syncthreads();
    unsigned before = 0, all = 0;
    for (unsigned w = 0; w < kWarps; ++w) {
      if (w < warp()) before += of_warp[w];
      all += of_warp[w];
    }
    if (threadIdx.x == 0) {
      start = all > 0 ? atomicAdd(&work.head->listed, all) : 0;
      work.tiles[tile] = {start, all, 0, 0};
    }
    __syncthreads();
    if (mine > 0 && start < work.room && all <= work.room - start)
      list_part(x, begin, least, work.list + start + before);
  }
}

// ---- 3. ----

__device__ bool all_listed(const Work& work) { return work.head->listed <= work.room; }

// Counts digit kDigit of those whose digits before it are the k-th greatest's.
template <unsigned kDigit>
__global__ void __launch_bounds__(kThreads) refine_kernel(const __grid_constant__ Work work) {
  __shared__ unsigned bins[kBins<kDigit>];
  Found found = work.head->found[0];
  if constexpr (kDigit == 2) {
    found = find<1>(work.head->bins1, found);
    if (blockIdx.x == 0 && threadIdx.x == 0) work.head->found[1] = found;
  }
  clear_bins(bins, kBins<kDigit>);
  const bool listed = all_listed(work);
  const size_t n = listed ? work.head->listed : work.count;
  const size_t stride = static_cast<size_t>(gridDim.x) * kThreads;
  for (size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x; i < n; i += stride) {
    const unsigned bits = (listed ? work.list[i].bits : __float_as_uint(work.values()[i])) & 0x7fffffff;
    if (bits >> kShift<kDigit - 1> == found.bits) atomicAdd(bins + (bits >> kShift<kDigit>) % kBins<kDigit>, 1u);
  }
  merge_bins(kDigit == 1 ? work.head->bins1 : work.head->bins2, bins, kBins<kDigit>);
}

// ---- 4. ----

// Calls use(entry, is there one) with the elements of a tile that may be sent, in order, as many at once as there are
// lanes.
template <class Use>
__device__ void for_entries(const Work& work, size_t tile, const Use& use) {
  const bool listed = all_listed(work);
  const size_t begin = tile * kTile;
  const unsigned n = listed ? work.tiles[tile].size : at_most(kTile, begin, work.count);
  const Entry* const entries = work.list + (listed ? work.tiles[tile].start : 0);
  for (unsigned i = lane(); i - lane() < n; i += kWarp) {
    Entry entry = {};
    if (i < n) {
      entry = listed ? entries[i] : Entry{static_cast<unsigned>(begin + i), __float_as_uint(work.values()[begin + i])};
    }
    use(entry, i < n);
  }
}

// A block of threads takes a block of the message.
__global__ void __launch_bounds__(kThreads) count_kernel(const __grid_constant__ Work work) {
  __shared__ Sum of_tile[kTiles];
  Found found = find<2>(work.head->bins2, work.head->found[1]);
  if (found.bits == 0) found.k = 0;  // zeros are not sent
  if (blockIdx.x == 0 && threadIdx.x == 0) work.head->found[2] = found;
  for (size_t block = blockIdx.x; block < work.n_blocks(); block += gridDim.x) {
    const size_t tile = block * kTiles + warp();
    unsigned beyond = 0, ties = 0;
    if (tile < work.n_tiles()) {
      for_entries(work, tile, [&](const Entry& entry, bool is) {
        const unsigned bits = entry.bits & 0x7fffffff;
        beyond += is && bits > found.bits;
        ties += is && bits == found.bits;
      });
    }
    beyond = __reduce_add_sync(kAllLanes, beyond);
    ties = __reduce_add_sync(kAllLanes, ties);
    if (lane() == 0) {
      of_tile[warp()] = static_cast<Sum>(ties) << 32 | beyond;
      if (tile < work.n_tiles()) {
        work.tiles[tile].beyond = beyond;
        work.tiles[tile].ties = ties;
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      Sum sum = 0;
      for (unsigned t = 0; t < kTiles; ++t) sum += of_tile[t];
      work.blocks[block] = sum;
    }
    __syncthreads();
  }
}

// One block of threads.
__global__ void __launch_bounds__(kThreads) scan_kernel(const __grid_constant__ Work work) {
  Sum before = 0;
  const size_t n = work.n_blocks();
  for (size_t begin = 0; begin < n; begin += kThreads) {
    const size_t block = begin + threadIdx.x;
    Sum total;
    const Sum here = block_scan(block < n ? work.blocks[block] : 0, total);
    if (block < n) work.blocks[block] = before + here;
    before += total;
  }
  if (threadIdx.x == 0) work.blocks[n] = before;
}

// ---- 5. ----

__device__ unsigned sent_of(Sum sum, unsigned ties_sent) {
  const auto ties = static_cast<unsigned>(sum >> 32);
  return static_cast<unsigned>(sum) + (ties < ties_sent ? ties : ties_sent);
}

// The parts of a message.
struct Parts {
  unsigned* counts;
  uint16_t* places;
  float* values;
};

__device__ void leave_feedback(const Work& work, unsigned index, bool sent) {
  for (float* const kept : {work.error, work.velocity}) {
    if (kept != nullptr && (sent || magnitude_bits(kept[index]) >= kInfinityBits)) kept[index] = 0;
  }
}

__device__ void write_tile(const Work& work, const Parts& to, size_t tile, Found found, Sum before) {
  unsigned at = sent_of(before, found.k), ties = static_cast<unsigned>(before >> 32);
  for_entries(work, tile, [&](const Entry& entry, bool is) {
    const unsigned bits = entry.bits & 0x7fffffff;
    const unsigned tied = __ballot_sync(kAllLanes, is && bits == found.bits);
    const unsigned rank = ties + __popc(tied & lanes_below());
    const bool sent = is && (bits > found.bits || (bits == found.bits && rank < found.k));
    const unsigned votes = __ballot_sync(kAllLanes, sent);
    if (sent) {
      const unsigned place = at + __popc(votes & lanes_below());
      to.places[place] = static_cast<uint16_t>(entry.index % kBlock);
      to.values[place] = __uint_as_float(entry.bits);
    }
    if (is && (sent || bits >= kInfinityBits)) leave_feedback(work, entry.index, sent);
    at += __popc(votes);
    ties += __popc(tied);
  });
}

__global__ void __launch_bounds__(kThreads) write_kernel(const __grid_constant__ Work work, Parts to, unsigned* sent) {
  const Found found = work.head->found[2];
  for (size_t block = blockIdx.x; block < work.n_blocks(); block += gridDim.x) {
    Sum before = work.blocks[block];
    if (threadIdx.x == 0) {
      to.counts[block] = sent_of(work.blocks[block + 1], found.k) - sent_of(before, found.k);
      if (block == 0 && sent != nullptr) *sent = sent_of(work.blocks[work.n_blocks()], found.k);
    }
    const size_t tile = block * kTiles + warp();
    if (tile >= work.n_tiles()) continue;
    for (size_t t = block * kTiles; t < tile; ++t) {
      before += static_cast<Sum>(work.tiles[t].ties) << 32 | work.tiles[t].beyond;
    }
    write_tile(work, to, tile, found, before);
  }
}

// ---- on the host ----

// Of evenly distributed values 1 / 64 are in the last bin, of normal ones less in that of the top 1 %.
size_t room_for(size_t count, size_t k) {
  const size_t room = k + count / 16 + 1024;
  return room < count ? room : count;
}

template <class T>
T* take(char*& at, size_t n) {
  T* const taken = reinterpret_cast<T*>(at);
  at += (n * sizeof(T) + 15) / 16 * 16;
  return taken;
}
// Places the parts of the scratch memory from `at` on; returns where they end.
char* place(Work& work, char* at) {
  work.head = take<Head>(at, 1);
  work.tiles = take<Tile>(at, work.n_tiles());
  work.blocks = take<Sum>(at, work.n_blocks() + 1);
  work.list = take<Entry>(at, work.room);
  return at;
}

template <auto* kKernel, class... Args>
void run(size_t blocks, cudaStream_t stream, const Args&... args) {
  const unsigned most = blocks_for<kKernel>(blocks * kThreads);
  launch_kernel<kKernel>(most, stream, "launching top-k", args...);
}

}  // namespace

size_t encode_top_scratch(size_t count, size_t k) {
  Work work = {};
  work.count = count;
  work.room = static_cast<unsigned>(room_for(count, k));
  char* const nowhere = nullptr;
  return static_cast<size_t>(place(work, nowhere) - nowhere);
}

void encode_top(void* message, const float* src, size_t count, size_t k, const Feedback& feedback, void* scratch,
                unsigned* sent, void* stream) {
  if (count >> 32 != 0 || k > count || (feedback.velocity != nullptr && feedback.error == nullptr) ||
      bytes_to_alignment(message, 4) != 0 || bytes_to_alignment(scratch, 16) != 0) {
    throw ArgumentError(
        "top-k on the GPU takes k <= count < 2^32, a velocity with an error only, a message that begins " +
        std::string("at a multiple of 4 bytes and scratch memory at one of 16"));
  }
  const auto on = static_cast<cudaStream_t>(stream);
  if (sent != nullptr) check(cudaMemsetAsync(sent, 0, sizeof(*sent), on), "clearing top-k's count");
  if (count == 0) return;
  Work work = {src,
               feedback.error,
               feedback.velocity,
               prepare_scale(DType::kFloat32, feedback.momentum),
               count,
               static_cast<unsigned>(k),
               true,
               nullptr,
               nullptr,
               nullptr,
               nullptr,
               static_cast<unsigned>(room_for(count, k))};
  for (const float* floats : {src, static_cast<const float*>(work.error), static_cast<const float*>(work.velocity)}) {
    work.aligned &= bytes_to_alignment(floats, kVectorBytes) == 0;
  }
  place(work, static_cast<char*>(scratch));
  check(cudaMemsetAsync(work.head, 0, sizeof(Head), on), "clearing top-k's scratch memory");
  check(cudaMemsetAsync(message, 0, top_bytes(count, k), on), "clearing a top-k message");
  run<&add_up_kernel>((count + kThreads * kQuad - 1) / (kThreads * kQuad), on, work);
  if (k == 0) return;
  run<&list_kernel>(work.n_tiles(), on, work);
  run<&refine_kernel<1>>((count + kThreads * kQuad - 1) / (kThreads * kQuad), on, work);
  run<&refine_kernel<2>>((count + kThreads * kQuad - 1) / (kThreads * kQuad), on, work);
  run<&count_kernel>(work.n_blocks(), on, work);
  run<&scan_kernel>(1, on, work);
  auto* const counts = static_cast<unsigned*>(message);
  auto* const places = reinterpret_cast<uint16_t*>(counts + work.n_blocks());
  run<&write_kernel>(work.n_blocks(), on, work,
                     Parts{counts, places, reinterpret_cast<float*>(places + (2 * k + 3) / 4 * 2)}, sent);
}

}  // namespace dcoll::kernels::cuda
