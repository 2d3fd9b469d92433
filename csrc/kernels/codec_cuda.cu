// The GPU twin of codec_cpu.cc. One pass over memory; the unit of work is a codec's block of 256 elements, by one warp:
//   1. A lane takes two quads, elements 4 * lane to 4 * lane + 3 and those 128 further, so that each load of a warp is
//      512 bytes side by side, 16 bytes from each lane.
//   2. Only int8 needs the other lanes: for the block's greatest magnitude, one reduction of the warp.
//   3. What is encoded is decoded in registers where there is feedback, so memory is neither read nor written twice.
//   4. Stochastic rounding draws as simd_draw.h: elements 128 apart share a hash, and so the two quads of a lane do.
// Pointers that are not aligned for a quad, and the last block, go element by element. An int8 block is 260 bytes long,
// so its quads of steps are aligned to 4 bytes, and stored by 4.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <string>
#include <type_traits>

#include "base/error.h"
#include "kernels/cuda.h"
#include "kernels/elements.cuh"
#include "kernels/float_bits.cuh"
#include "kernels/scale.h"
#include "kernels/warp.cuh"

namespace dcoll::kernels::cuda {
namespace {

constexpr unsigned kQuads = 2, kQuad = 4;
constexpr unsigned kBlock = kCodecBlock;
static_assert(kBlock == kWarp * kQuads * kQuad);

// What a lane has of a block.
struct Lane8 {
  float x[kQuads * kQuad];
};

__device__ unsigned first_of_quad(unsigned quad) { return quad * kWarp * kQuad + lane() * kQuad; }

// Elements of a block at `at`, of which there are n; beyond them, zeros. `whole`: quads are aligned.
template <class T, class Use>
__device__ void load_quads(const T* at, unsigned n, bool whole, const Use& use) {
#pragma unroll
  for (unsigned q = 0; q < kQuads; ++q) {
    const unsigned first = first_of_quad(q);
    Pack<T, kQuad> quad = {};
    if (whole && n == kBlock) {
      quad = *reinterpret_cast<const Pack<T, kQuad>*>(at + first);
    } else {
#pragma unroll
      for (unsigned i = 0; i < kQuad; ++i) {
        if (first + i < n) quad.v[i] = at[first + i];
      }
    }
#pragma unroll
    for (unsigned i = 0; i < kQuad; ++i) use(q * kQuad + i, quad.v[i]);
  }
}

template <class T, class Make>
__device__ void store_quads(T* at, unsigned n, bool whole, const Make& make) {
#pragma unroll
  for (unsigned q = 0; q < kQuads; ++q) {
    const unsigned first = first_of_quad(q);
    Pack<T, kQuad> quad;
#pragma unroll
    for (unsigned i = 0; i < kQuad; ++i) quad.v[i] = make(q * kQuad + i);
    if (whole && n == kBlock) {
      store_pack(at + first, quad);
    } else {
#pragma unroll
      for (unsigned i = 0; i < kQuad; ++i) {
        if (first + i < n) at[first + i] = quad.v[i];
      }
    }
  }
}

__device__ Lane8 load_floats(const float* at, unsigned n, bool whole) {
  Lane8 block;
  load_quads(at, n, whole, [&](unsigned i, float x) { block.x[i] = x; });
  return block;
}
__device__ void store_floats(float* at, unsigned n, bool whole, const Lane8& block) {
  store_quads(at, n, whole, [&](unsigned i) { return block.x[i]; });
}

// ---- how elements are rounded. bits_of_block() are a lane's random bits, of() those of one element. ----

struct ToNearest {
  static constexpr bool kAtRandom = false;
  __device__ ToNearest bits_of_block(size_t) const { return {}; }
};

struct RandomBits {
  static constexpr bool kAtRandom = true;
  uint32_t words[kQuad];
  __device__ uint32_t of(unsigned i) const { return i < kQuad ? words[i] & 0xffff : words[i - kQuad] >> 16; }
};

struct AtRandom {
  uint64_t key;
  __device__ RandomBits bits_of_block(size_t b) const {
    RandomBits bits;
#pragma unroll
    for (unsigned i = 0; i < kQuad; ++i) {
      uint32_t x = static_cast<uint32_t>(b * (kBlock / kQuads)) + first_of_quad(0) + i + static_cast<uint32_t>(key);
      x = (x ^ x >> 16) * 0x7feb352du;
      x = (x ^ x >> 15 ^ static_cast<uint32_t>(key >> 32)) * 0x846ca68bu;
      bits.words[i] = x ^ x >> 16;
    }
    return bits;
  }
};

// ---- the forms: what a block is in memory. encode() makes of `block` what decoding gives; all lanes call it. ----

struct Float32 {
  using Element = float;
  static constexpr size_t kBlockBytes = 4 * kBlock;
  __device__ static unsigned encode(void* dst, Lane8& block, unsigned n, bool whole, const ToNearest&) {
    store_floats(static_cast<float*>(dst), n, whole, block);
    return 0;
  }
  __device__ static Lane8 decode(const void* src, unsigned n, bool whole) {
    return load_floats(static_cast<const float*>(src), n, whole);
  }
};

// 16 bits: From converts to and from them.
template <class From>
struct Narrow {
  using Element = uint16_t;
  static constexpr size_t kBlockBytes = 2 * kBlock;
  template <class Bits>
  __device__ static unsigned encode(void* dst, Lane8& block, unsigned n, bool whole, const Bits& random) {
    unsigned beyond = 0;
    uint16_t bits[kQuads * kQuad];
#pragma unroll
    for (unsigned i = 0; i < kQuads * kQuad; ++i) {
      if constexpr (Bits::kAtRandom) {
        bits[i] = From::narrow(block.x[i], beyond, random.of(i));
      } else {
        bits[i] = From::narrow(block.x[i], beyond);
      }
      block.x[i] = From::widen(bits[i]);
    }
    store_quads(static_cast<uint16_t*>(dst), n, whole, [&](unsigned i) { return bits[i]; });
    return beyond;
  }
  __device__ static Lane8 decode(const void* src, unsigned n, bool whole) {
    Lane8 block;
    load_quads(static_cast<const uint16_t*>(src), n, whole,
               [&](unsigned i, uint16_t x) { block.x[i] = From::widen(x); });
    return block;
  }
};

// Infinity and NaN by their bits: the GPU would give another NaN than the CPU.
struct Half {
  static constexpr uint32_t kGreatest = 0x477fe000;  // the bits of 65504
  __device__ static uint16_t narrow(float x, unsigned& beyond) {
    const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    if (magnitude > kInfinityBits) return static_cast<uint16_t>(sign | 0x7e00 | (bits >> 13 & 0x3ff));
    if (magnitude > kGreatest && magnitude < kInfinityBits) {
      ++beyond;
      return static_cast<uint16_t>(sign | 0x7bff);
    }
    return __half_as_ushort(__float2half_rn(x));
  }
  // 13 drawn bits below what normal float16 keeps; 16 below what subnormal ones do, in steps of 2^-40.
  __device__ static uint16_t narrow(float x, unsigned& beyond, uint32_t draw) {
    const uint32_t magnitude = magnitude_bits(x), sign = __float_as_uint(x) >> 16 & 0x8000;
    if (magnitude >= kGreatest) return narrow(x, beyond);
    const uint32_t rounded =
        magnitude < (113u << 23)
            ? (static_cast<uint32_t>(__float2int_rz(__fmul_rn(__uint_as_float(magnitude), 0x1p40f))) + draw) >> 16
            : (magnitude + (draw >> 3) - (112u << 23)) >> 13;
    return static_cast<uint16_t>(sign | rounded);
  }
  __device__ static float widen(uint16_t bits) {
    if ((bits & 0x7fff) <= 0x7c00) return __half2float(__ushort_as_half(bits));
    return __uint_as_float((bits & 0x8000u) << 16 | kInfinityBits | kQuietBit | (bits & 0x3ffu) << 13);
  }
};
struct Brain {
  __device__ static uint16_t narrow(float x, unsigned&) {
    const uint32_t bits = __float_as_uint(x);
    const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
    return static_cast<uint16_t>((x != x ? bits | kQuietBit : rounded) >> 16);
  }
  // 16 drawn bits below the kept half; none to the greatest value, to infinity and to NaN.
  __device__ static uint16_t narrow(float x, unsigned&, uint32_t draw) {
    const uint32_t bits = __float_as_uint(x);
    if (magnitude_bits(x) >= 0x7f7f0000) return static_cast<uint16_t>((x != x ? bits | kQuietBit : bits) >> 16);
    return static_cast<uint16_t>((bits + draw) >> 16);
  }
  __device__ static float widen(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
};

struct Int8 {
  using Element = int8_t;
  static constexpr size_t kBlockBytes = 4 + kBlock;
  template <class Bits>
  __device__ static unsigned encode(void* dst, Lane8& block, unsigned n, bool whole, const Bits& random) {
    uint32_t most = 0;
#pragma unroll
    for (unsigned i = 0; i < kQuads * kQuad; ++i) {
      const uint32_t magnitude = magnitude_bits(block.x[i]);
      most = magnitude > most ? magnitude : most;
    }
    most = __reduce_max_sync(kAllLanes, most);
    const float greatest = __uint_as_float(most);
    const bool finite = most < kInfinityBits, counts = greatest >= 1e-36f;
    float scale = !finite ? __uint_as_float(kInfinityBits | kQuietBit) : counts ? __fdiv_rn(greatest, 127.0f) : 0.0f;
    if (finite && __fmul_rn(scale, 127.0f) > 0x1.fffffep127f) scale = __uint_as_float(__float_as_uint(scale) - 1);
    const float per_step = finite && counts ? __fdiv_rn(127.0f, greatest) : 0.0f;
    int8_t steps[kQuads * kQuad];
#pragma unroll
    for (unsigned i = 0; i < kQuads * kQuad; ++i) {
      // Adding 1.5 * 2^23 leaves the whole number, rounded to nearest even, in the low bits.
      float multiple = __fmul_rn(block.x[i], per_step);
      if constexpr (Bits::kAtRandom) multiple = __fadd_rn(multiple, dither(random.of(i)));
      int step = static_cast<int>(__float_as_uint(__fadd_rn(multiple, 12582912.0f)) - 0x4b400000);
      if constexpr (Bits::kAtRandom) step = step > 127 ? 127 : step < -127 ? -127 : step;  // 127 and a bit, dithered
      steps[i] = finite ? static_cast<int8_t>(step) : int8_t{0};
      block.x[i] = multiply(__int2float_rn(steps[i]), scale);
    }
    if (lane() == 0) *static_cast<float*>(dst) = scale;
    store_quads(static_cast<int8_t*>(dst) + 4, n, whole, [&](unsigned i) { return steps[i]; });
    return 0;
  }
  // What is added before the nearest whole number is taken: between -1/2 and 1/2, both excluded.
  __device__ static float dither(uint32_t draw) {
    return __fadd_rn(__fmul_rn(__int2float_rn(static_cast<int>(draw)), 0x1p-16f), -0x1.fffep-2f);
  }
  __device__ static Lane8 decode(const void* src, unsigned n, bool whole) {
    const float scale = *static_cast<const float*>(src);
    Lane8 block;
    load_quads(static_cast<const int8_t*>(src) + 4, n, whole,
               [&](unsigned i, int8_t step) { block.x[i] = multiply(__int2float_rn(step), scale); });
    return block;
  }
};

// ---- the kernels ----

__device__ float finite_or(float x, float other) { return __fsub_rn(x, x) == 0.0f ? x : other; }

// Calls work(block, n) for the blocks of this warp.
template <class Work>
__device__ void for_blocks(size_t count, const Work& work) {
  const size_t first = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x / kWarp;
  const size_t blocks = (count + kBlock - 1) / kBlock;
  for (size_t b = first; b < blocks; b += stride) {
    const size_t left = count - b * kBlock;
    work(b, static_cast<unsigned>(left < kBlock ? left : kBlock));
  }
}

__device__ void count_beyond(unsigned found, unsigned long long* beyond) {
  if (beyond == nullptr) return;
  found = __reduce_add_sync(kAllLanes, found);
  if (lane() == 0 && found > 0) atomicAdd(beyond, static_cast<unsigned long long>(found));
}

struct Feed {
  float* error;
  unsigned long long* beyond;
  bool aligned;  // the floats, for quads
};

template <class Form, class Rounding>
__global__ void __launch_bounds__(kThreads)
    encode_kernel(char* dst, bool dst_aligned, const float* src, size_t count, Feed feed, Rounding rounding) {
  unsigned beyond = 0;
  for_blocks(count, [&](size_t b, unsigned n) {
    Lane8 block = load_floats(src + b * kBlock, n, feed.aligned);
    Lane8 error = {};
    if (feed.error != nullptr) {
      error = load_floats(feed.error + b * kBlock, n, feed.aligned);
#pragma unroll
      for (unsigned i = 0; i < kQuads * kQuad; ++i) block.x[i] = add(block.x[i], error.x[i]);
    }
    const Lane8 whole = block;
    beyond += Form::encode(dst + b * Form::kBlockBytes, block, n, dst_aligned, rounding.bits_of_block(b));
    if (feed.error == nullptr) return;
#pragma unroll
    for (unsigned i = 0; i < kQuads * kQuad; ++i) {
      block.x[i] = finite_or(__fsub_rn(whole.x[i], block.x[i]), finite_or(error.x[i], 0.0f));
    }
    store_floats(feed.error + b * kBlock, n, feed.aligned, block);
  });
  count_beyond(beyond, feed.beyond);
}

template <class Form>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(float* dst, bool dst_aligned, const char* src, bool src_aligned, size_t count) {
  for_blocks(count, [&](size_t b, unsigned n) {
    store_floats(dst + b * kBlock, n, dst_aligned, Form::decode(src + b * Form::kBlockBytes, n, src_aligned));
  });
}

struct Messages {
  const char* at[kMaxPointers];
  unsigned size;
};

template <class Form, class Rounding>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(char* dst, const __grid_constant__ Messages srcs, bool forms_aligned, size_t count, Scale scale,
               float back, Feed feed, Rounding rounding) {
  unsigned beyond = 0;
  for_blocks(count, [&](size_t b, unsigned n) {
    Lane8 sum = Form::decode(srcs.at[0] + b * Form::kBlockBytes, n, forms_aligned);
#pragma unroll 4
    for (unsigned s = 1; s < srcs.size; ++s) {
      const Lane8 next = Form::decode(srcs.at[s] + b * Form::kBlockBytes, n, forms_aligned);
#pragma unroll
      for (unsigned i = 0; i < kQuads * kQuad; ++i) sum.x[i] = add(sum.x[i], next.x[i]);
    }
#pragma unroll
    for (unsigned i = 0; i < kQuads * kQuad; ++i) sum.x[i] = scaled_bits(sum.x[i], scale);
    const Lane8 whole = sum;
    __syncwarp();  // dst may be srcs[0], of which every lane reads the scale of int8
    beyond += Form::encode(dst + b * Form::kBlockBytes, sum, n, forms_aligned, rounding.bits_of_block(b));
    if (feed.error == nullptr) return;
    Lane8 error = load_floats(feed.error + b * kBlock, n, feed.aligned);
#pragma unroll
    for (unsigned i = 0; i < kQuads * kQuad; ++i) {
      const float lost = finite_or(__fsub_rn(whole.x[i], sum.x[i]), 0.0f);
      error.x[i] = add(error.x[i], __fmul_rn(lost, back));
    }
    store_floats(feed.error + b * kBlock, n, feed.aligned, error);
  });
  count_beyond(beyond, feed.beyond);
}

// ---- launching them ----

template <class Use>
void with_form(Codec codec, const Use& use) {
  switch (codec) {
    case Codec::kFloat16:
      return use.template operator()<Narrow<Half>>();
    case Codec::kBFloat16:
      return use.template operator()<Narrow<Brain>>();
    case Codec::kInt8:
      return use.template operator()<Int8>();
    case Codec::kFloat32:
      return use.template operator()<Float32>();
    case Codec::kNone:
    case Codec::kTopK:
      throw ArgumentError("'" + std::string(codec_name(codec)) + "' is none of fp16, bf16, int8 and fp32");
  }
}

// Of what can be rounded at random, so is what has a key.
template <class Form, class Use>
void with_rounding(const Key& key, const Use& use) {
  if constexpr (!std::is_same_v<Form, Float32>) {
    if (key) return use(AtRandom{*key});
  }
  use(ToNearest{});
}

// Whether quads of T at `at` are aligned. Of encoded forms 4 bytes are asked for.
template <class T>
bool quads_at(const void* at) {
  if (bytes_to_alignment(at, 4) != 0) {
    throw ArgumentError("an encoded form on the GPU, and what is encoded, must begin at a multiple of 4 bytes");
  }
  return bytes_to_alignment(at, kQuad * sizeof(T)) == 0;
}

size_t threads_for(size_t count) { return (count + kBlock - 1) / kBlock * kWarp; }

}  // namespace

void encode(Codec codec, void* dst, const float* src, size_t count, float* error, unsigned long long* beyond,
            const Key& key, void* stream) {
  with_form(codec, [&]<class Form>() {
    if (count == 0) return;
    const bool aligned = quads_at<float>(src) && (error == nullptr || quads_at<float>(error));
    with_rounding<Form>(key, [&]<class Rounding>(const Rounding& rounding) {
      constexpr auto* kernel = &encode_kernel<Form, Rounding>;
      launch_kernel<kernel>(blocks_for<kernel>(threads_for(count)), static_cast<cudaStream_t>(stream),
                            "launching encode", static_cast<char*>(dst), quads_at<typename Form::Element>(dst), src,
                            count, Feed{error, beyond, aligned}, rounding);
    });
  });
}

void decode(Codec codec, float* dst, const void* src, size_t count, void* stream) {
  with_form(codec, [&]<class Form>() {
    if (count == 0) return;
    constexpr auto* kernel = &decode_kernel<Form>;
    launch_kernel<kernel>(blocks_for<kernel>(threads_for(count)), static_cast<cudaStream_t>(stream), "launching decode",
                          dst, quads_at<float>(dst), static_cast<const char*>(src),
                          quads_at<typename Form::Element>(src), count);
  });
}

void sum_encoded(Codec codec, void* dst, std::span<const void* const> srcs, size_t count, double factor, float* error,
                 unsigned long long* beyond, const Key& key, void* stream) {
  if (srcs.empty() || srcs.size() > kMaxPointers) {
    throw ArgumentError("the sum of encoded forms on the GPU needs 1 to " + std::to_string(kMaxPointers) +
                        " of them (got " + std::to_string(srcs.size()) + ")");
  }
  const Scale scale = prepare_scale(DType::kFloat32, factor);
  with_form(codec, [&]<class Form>() {
    if (count == 0) return;
    Messages messages;
    messages.size = static_cast<unsigned>(srcs.size());
    bool aligned = quads_at<typename Form::Element>(dst);
    for (unsigned s = 0; s < messages.size; ++s) {
      messages.at[s] = static_cast<const char*>(srcs[s]);
      aligned &= quads_at<typename Form::Element>(srcs[s]);
    }
    with_rounding<Form>(key, [&]<class Rounding>(const Rounding& rounding) {
      constexpr auto* kernel = &sum_kernel<Form, Rounding>;
      launch_kernel<kernel>(blocks_for<kernel>(threads_for(count)), static_cast<cudaStream_t>(stream),
                            "launching a sum of encoded forms", static_cast<char*>(dst), messages, aligned, count,
                            scale, static_cast<float>(1.0 / factor),
                            Feed{error, beyond, error == nullptr || quads_at<float>(error)}, rounding);
    });
  });
}

}  // namespace dcoll::kernels::cuda
