// The GPU twin of reduce_cpu.cc. One pass over memory, in three parts:
//   1. Body: each thread takes 16 bytes from the same place of every source, combines them in registers in the order of
//      the sources (16-bit floats in float32), scales, rounds once, and stores to every destination. All loads come
//      before the first store, so a destination may be a source.
//   2. Head and tail: the elements before the first 16-byte boundary and after the last, one per thread, in the same
//      launch.
//   3. Pointers that are not aligned alike have no common boundary: then everything is tail, one element per thread.
// The work is memory-bound, so what matters is wide coalesced accesses, and enough of them in flight; CUB's device-wide
// algorithms have no form for n sources and m destinations in place.
#include <cuda_runtime.h>

#include <string>
#include <type_traits>

#include "base/error.h"
#include "kernels/cuda.h"
#include "kernels/cuda_status.h"
#include "kernels/elements.cuh"
#include "kernels/scale.h"

namespace dcoll::kernels::cuda {
namespace {

struct Sum {
  template <class T>
  __device__ static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      return a + b;
    } else {
      using U = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));  // wraps
    }
  }
};
struct Product {
  template <class T>
  __device__ static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      return a * b;
    } else {
      using U = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<U>(1u * static_cast<U>(a) * static_cast<U>(b)));  // of 16 bits not as int
    }
  }
};
// The same selects as on the CPU, so that min(-0, +0) is the same zero. NaN in b is taken by the comparison being
// false.
struct Min {
  template <class T>
  __device__ static T apply(T a, T b) {
    if (a != a) return a;
    return a < b ? a : b;
  }
};
struct Max {
  template <class T>
  __device__ static T apply(T a, T b) {
    if (a != a) return a;
    return a > b ? a : b;
  }
};

struct And {
  template <class T>
  __device__ static T apply(T a, T b) {
    return a & b;
  }
};
struct Or {
  template <class T>
  __device__ static T apply(T a, T b) {
    return a | b;
  }
};
struct Xor {
  template <class T>
  __device__ static T apply(T a, T b) {
    return a ^ b;
  }
};

struct Pointers {
  const void* srcs[kMaxPointers];
  void* dsts[kMaxPointers];
  unsigned n_srcs, n_dsts;
};
static_assert(sizeof(Pointers) <= 3072, "kernel parameters are limited to 4 KiB, some of which others need");

template <class T>
__device__ T scaled(T value, const Scale& scale) {
  if (!scale.active) return value;
  if constexpr (std::is_floating_point_v<T>) {
    return scale.divisor == 1 ? value * static_cast<T>(scale.factor) : value / static_cast<T>(scale.divisor);
  } else {
    using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    if (scale.divisor != 1) return static_cast<T>(value / static_cast<Wide>(scale.divisor));
    constexpr bool kSigned = std::is_signed_v<T>;
    constexpr T kLeast = kSigned ? static_cast<T>(uint64_t{1} << (8 * sizeof(T) - 1)) : T{0};
    constexpr T kMost = static_cast<T>(~kLeast);
    const double x = static_cast<double>(value) * scale.factor;
    return x <= static_cast<double>(kLeast) ? kLeast : x >= static_cast<double>(kMost) ? kMost : static_cast<T>(x);
  }
}

// Reduces the pack of N elements at element index `at`, which is aligned for it.
template <class T, class Op, int N, unsigned kSrcs>
__device__ void reduce_pack(const Pointers& p, size_t at, const Scale& scale) {
  using P = Pack<T, N>;
  const auto load = [&](unsigned s) { return *reinterpret_cast<const P*>(static_cast<const T*>(p.srcs[s]) + at); };
  Lane<T> acc[N];
  const auto start = [&](const P& x) {
#pragma unroll
    for (int i = 0; i < N; ++i) acc[i] = Convert<Lane<T>, T>::apply(x.v[i]);
  };
  const auto add = [&](const P& x) {
#pragma unroll
    for (int i = 0; i < N; ++i) acc[i] = Op::apply(acc[i], Convert<Lane<T>, T>::apply(x.v[i]));
  };
  if constexpr (kSrcs == 2) {  // both loads are issued before either is waited for
    const P a = load(0), b = load(1);
    start(a);
    add(b);
  } else {
    start(load(0));
#pragma unroll 4
    for (unsigned s = 1; s < p.n_srcs; ++s) add(load(s));
  }
  P out;
#pragma unroll
  for (int i = 0; i < N; ++i) out.v[i] = Convert<T, Lane<T>>::apply(scaled(acc[i], scale));
#pragma unroll 1  // a store waits for nothing, so unrolling would only repeat it
  for (unsigned d = 0; d < p.n_dsts; ++d) store_pack(static_cast<T*>(p.dsts[d]) + at, out);
}

// Elements [head, head + packs * N) are the body; the rest are head and tail. kSrcs: 2, or 0 for p.n_srcs.
template <class T, class Op, unsigned kSrcs>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const __grid_constant__ Pointers p, size_t count, size_t head, size_t packs, Scale scale) {
  constexpr int N = kVectorBytes / sizeof(T);
  const size_t first = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = first; i < packs; i += stride) reduce_pack<T, Op, N, kSrcs>(p, head + i * N, scale);
  for (size_t i = first; i < count - packs * N; i += stride) {
    reduce_pack<T, Op, 1, kSrcs>(p, i < head ? i : i + packs * N, scale);
  }
}

template <class T, class Op>
void launch(const Pointers& p, size_t count, const Scale& scale, cudaStream_t stream) {
  constexpr size_t N = kVectorBytes / sizeof(T);
  const size_t to_boundary = bytes_to_alignment(p.dsts[0], kVectorBytes);
  bool alike = true;
  for (unsigned s = 0; s < p.n_srcs; ++s) alike &= bytes_to_alignment(p.srcs[s], kVectorBytes) == to_boundary;
  for (unsigned d = 0; d < p.n_dsts; ++d) alike &= bytes_to_alignment(p.dsts[d], kVectorBytes) == to_boundary;
  const size_t head = alike && to_boundary / sizeof(T) < count ? to_boundary / sizeof(T) : count;
  const size_t packs = (count - head) / N;
  const size_t rest = count - packs * N;
  const size_t work = packs > rest ? packs : rest;
  const auto start = [&]<auto * kKernel>() {
    launch_kernel<kKernel>(blocks_for<kKernel>(work), stream, "launching reduce", p, count, head, packs, scale);
  };
  p.n_srcs == 2 ? start.template operator()<&reduce_kernel<T, Op, 2>>()
                : start.template operator()<&reduce_kernel<T, Op, 0>>();
}

template <class T>
void launch_op(ReduceOp op, const Pointers& p, size_t count, const Scale& scale, cudaStream_t stream) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return launch<T, Sum>(p, count, scale, stream);
    case ReduceOp::kAdasum:
      break;  // check_operator
    case ReduceOp::kMin:
      return launch<T, Min>(p, count, scale, stream);
    case ReduceOp::kMax:
      return launch<T, Max>(p, count, scale, stream);
    case ReduceOp::kProduct:
      return launch<T, Product>(p, count, scale, stream);
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
      break;  // launch_bits
  }
}

template <class T>
void launch_bits(ReduceOp op, const Pointers& p, size_t count, cudaStream_t stream) {
  const Scale unscaled{false, 1.0, 1};
  if (op == ReduceOp::kBitAnd) return launch<T, And>(p, count, unscaled, stream);
  if (op == ReduceOp::kBitOr) return launch<T, Or>(p, count, unscaled, stream);
  return launch<T, Xor>(p, count, unscaled, stream);
}

void launch_bits(DType dtype, ReduceOp op, const Pointers& p, size_t count, cudaStream_t stream) {
  if (dtype_bytes(dtype) == 1) return launch_bits<uint8_t>(op, p, count, stream);
  if (dtype_bytes(dtype) == 2) return launch_bits<uint16_t>(op, p, count, stream);
  launch_bits<uint32_t>(op, p, count * (dtype_bytes(dtype) / sizeof(uint32_t)), stream);
}

void launch_dtype(DType dtype, ReduceOp op, const Pointers& p, size_t count, const Scale& scale, cudaStream_t stream) {
  switch (dtype) {
    case DType::kFloat16:
      return launch_op<__half>(op, p, count, scale, stream);
    case DType::kBFloat16:
      return launch_op<__nv_bfloat16>(op, p, count, scale, stream);
    case DType::kFloat32:
      return launch_op<float>(op, p, count, scale, stream);
    case DType::kFloat64:
      return launch_op<double>(op, p, count, scale, stream);
    case DType::kInt8:
      return launch_op<int8_t>(op, p, count, scale, stream);
    case DType::kUInt8:
      return launch_op<uint8_t>(op, p, count, scale, stream);
    case DType::kInt32:
      return launch_op<int32_t>(op, p, count, scale, stream);
    case DType::kInt64:
      return launch_op<int64_t>(op, p, count, scale, stream);
    case DType::kBool:
      // 0 or 1 in a byte: OR is max, which sum becomes (1 + 1 must stay 1); AND is min, and product.
      return launch_op<uint8_t>(op == ReduceOp::kSum || op == ReduceOp::kAverage ? ReduceOp::kMax : op, p, count, scale,
                                stream);
    case DType::kInt16:
      return launch_op<int16_t>(op, p, count, scale, stream);
    case DType::kUInt16:
      return launch_op<uint16_t>(op, p, count, scale, stream);
    case DType::kUInt32:
      return launch_op<uint32_t>(op, p, count, scale, stream);
    case DType::kUInt64:
      return launch_op<uint64_t>(op, p, count, scale, stream);
  }
}

void run(std::span<void* const> dsts, std::span<const void* const> srcs, size_t count, DType dtype, ReduceOp op,
         double scale_factor, void* stream) {
  if (srcs.empty() || dsts.empty() || srcs.size() > kMaxPointers || dsts.size() > kMaxPointers) {
    throw ArgumentError("reduce on the GPU needs 1 to " + std::to_string(kMaxPointers) +
                        " sources and as many destinations (got " + std::to_string(srcs.size()) + " and " +
                        std::to_string(dsts.size()) + "): reduce in groups");
  }
  check_operator(dtype, op, scale_factor);
  const Scale scale = prepare_scale(dtype, scale_factor);
  if (count == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (srcs.size() == 1 && !scale.active) {  // nothing to combine: a copy, which keeps every bit, of NaNs too
    for (void* dst : dsts) {
      if (dst == srcs[0]) continue;
      check(cudaMemcpyAsync(dst, srcs[0], count * dtype_bytes(dtype), cudaMemcpyDefault, cuda_stream), "copying");
    }
    return;
  }
  Pointers p;
  p.n_srcs = static_cast<unsigned>(srcs.size());
  p.n_dsts = static_cast<unsigned>(dsts.size());
  for (unsigned s = 0; s < p.n_srcs; ++s) p.srcs[s] = srcs[s];
  for (unsigned d = 0; d < p.n_dsts; ++d) p.dsts[d] = dsts[d];
  if (is_bitwise(op)) return launch_bits(dtype, op, p, count, cuda_stream);
  launch_dtype(dtype, op, p, count, scale, cuda_stream);
}

template <class... Kernels>
bool load(Kernels*... kernels) {
  cudaFuncAttributes found;
  return ((cudaFuncGetAttributes(&found, kernels) == cudaSuccess) && ...);
}
// All that launch() may choose for T.
template <class T, class... Ops>
bool load_all() {
  return load(&reduce_kernel<T, Ops, 2>...) && load(&reduce_kernel<T, Ops, 0>...);
}
template <class... Ts>
bool load_numbers() {
  return (load_all<Ts, Sum, Min, Max, Product>() && ...);
}
template <class... Ts>
bool load_bits() {
  return (load_all<Ts, And, Or, Xor>() && ...);
}

}  // namespace

bool load_reductions() {
  if (load_numbers<__half, __nv_bfloat16, float, double, int8_t, int16_t, int32_t, int64_t>() &&
      load_numbers<uint8_t, uint16_t, uint32_t, uint64_t>() && load_bits<uint8_t, uint16_t, uint32_t>()) {
    return true;
  }
  (void)cudaGetLastError();
  return false;
}

void reduce2(void* dst, const void* a, const void* b, size_t count, DType dtype, ReduceOp op, double scale,
             void* stream) {
  const void* const srcs[] = {a, b};
  run({&dst, 1}, srcs, count, dtype, op, scale, stream);
}

void reduce_n(void* dst, std::span<const void* const> srcs, size_t count, DType dtype, ReduceOp op, double scale,
              void* stream) {
  run({&dst, 1}, srcs, count, dtype, op, scale, stream);
}

void reduce_n_to_n(std::span<void* const> dsts, std::span<const void* const> srcs, size_t count, DType dtype,
                   ReduceOp op, double scale, void* stream) {
  run(dsts, srcs, count, dtype, op, scale, stream);
}

void scale(void* dst, const void* src, size_t count, DType dtype, double scale, void* stream) {
  run({&dst, 1}, {&src, 1}, count, dtype, ReduceOp::kSum, scale, stream);
}

}  // namespace dcoll::kernels::cuda
