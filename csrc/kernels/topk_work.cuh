// What the kernels of topk_cuda.cu pass on to each other in scratch memory, and how they read and write floats.
// Included there only, and so of internal linkage.
#pragma once

#include <cuda_runtime.h>

#include "kernels/dispatch.h"
#include "kernels/elements.cuh"
#include "kernels/warp.cuh"

namespace dcoll::kernels::cuda {
namespace {

using Sum = unsigned long long;

constexpr unsigned kQuad = 4, kQuads = 8;
constexpr unsigned kTile = kThreads * kQuad * kQuads;          // listed together by a block
constexpr unsigned kOfWarp = kTile / kWarps;                   // of it, by a warp
constexpr unsigned kBlock = 1 << 16, kTiles = kBlock / kTile;  // of a message
static_assert(kTiles == kWarps, "a block of threads takes a block of the message, a warp one of its tiles");

// The digits of a magnitude, from the greatest.
template <unsigned kDigit>
constexpr unsigned kShift = kDigit == 0   ? 18
                            : kDigit == 1 ? 9
                                          : 0;
template <unsigned kDigit>
constexpr unsigned kBins = kDigit == 0 ? 1 << 13 : 1 << 9;

struct Found {
  unsigned bits;  // the digits of the k-th greatest
  unsigned k;     // how many of those with these digits are sent
};
struct Entry {
  unsigned index, bits;
};
struct Tile {
  unsigned start, size;   // in the list
  unsigned beyond, ties;  // of the tile: greater than the k-th greatest, and equal to it
};
struct Head {  // zeros at first
  unsigned bins0[kBins<0>], bins1[kBins<1>], bins2[kBins<2>];
  Found found[3];
  unsigned listed;
};

struct Work {
  const float* src;
  float *error, *velocity;
  Scale momentum;
  size_t count;
  unsigned k;
  bool aligned;  // all of the floats, to 16 bytes
  Head* head;
  Tile* tiles;
  Sum* blocks;  // of each: ties << 32 | beyond; then of all before it
  Entry* list;
  unsigned room;

  __host__ __device__ size_t n_tiles() const { return (count + kTile - 1) / kTile; }
  __host__ __device__ size_t n_blocks() const { return (count + kBlock - 1) / kBlock; }
  __device__ const float* values() const { return error != nullptr ? error : src; }
};

struct Quad {
  float x[kQuad];
};

__device__ Quad load(const float* from, size_t at, unsigned n, bool aligned) {
  Quad quad = {};
  if (aligned && n == kQuad) {
    const auto pack = *reinterpret_cast<const Pack<float, kQuad>*>(from + at);
#pragma unroll
    for (unsigned i = 0; i < kQuad; ++i) quad.x[i] = pack.v[i];
    return quad;
  }
#pragma unroll
  for (unsigned i = 0; i < kQuad; ++i) {
    if (i < n) quad.x[i] = from[at + i];
  }
  return quad;
}
__device__ void store(float* to, size_t at, unsigned n, bool aligned, const Quad& quad) {
  if (aligned && n == kQuad) {
    store_pack(to + at, Pack<float, kQuad>{quad.x[0], quad.x[1], quad.x[2], quad.x[3]});
    return;
  }
#pragma unroll
  for (unsigned i = 0; i < kQuad; ++i) {
    if (i < n) to[at + i] = quad.x[i];
  }
}

}  // namespace
}  // namespace dcoll::kernels::cuda
