// The GPU twin of cast_cpu.cc: each thread converts as many elements as fill 16 bytes of the wider type; those before
// the first boundary and after the last are converted one per thread in the same launch.
#include <cuda_runtime.h>

#include <string>
#include <type_traits>

#include "base/error.h"
#include "kernels/cuda.h"
#include "kernels/cuda_status.h"
#include "kernels/elements.cuh"

namespace dcoll::kernels::cuda {
namespace {

template <class D, class S>
constexpr int kPerThread = kVectorBytes / (sizeof(D) > sizeof(S) ? sizeof(D) : sizeof(S));

template <class D, class S, int N>
__device__ void cast_pack(D* dst, const S* src, size_t at) {
  const auto in = *reinterpret_cast<const Pack<S, N>*>(src + at);
  Pack<D, N> out;
#pragma unroll
  for (int i = 0; i < N; ++i) out.v[i] = Convert<D, S>::apply(in.v[i]);
  store_pack(dst + at, out);
}

// Elements [head, head + packs * N) are aligned for packs. dst may be src where both types have one size.
template <class D, class S>
__global__ void __launch_bounds__(kThreads) cast_kernel(D* dst, const S* src, size_t count, size_t head, size_t packs) {
  constexpr int N = kPerThread<D, S>;
  const size_t first = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = first; i < packs; i += stride) cast_pack<D, S, N>(dst, src, head + i * N);
  for (size_t i = first; i < count - packs * N; i += stride) {
    cast_pack<D, S, 1>(dst, src, i < head ? i : i + packs * N);
  }
}

template <class D, class S>
void launch(void* dst, const void* src, size_t count, cudaStream_t stream) {
  constexpr size_t N = kPerThread<D, S>;
  const size_t src_head = bytes_to_alignment(src, N * sizeof(S)) / sizeof(S);
  const size_t dst_head = bytes_to_alignment(dst, N * sizeof(D)) / sizeof(D);
  const size_t head = src_head == dst_head && src_head < count ? src_head : count;
  const size_t packs = (count - head) / N;
  const size_t rest = count - packs * N;
  constexpr auto* kernel = &cast_kernel<D, S>;
  const unsigned blocks = blocks_for<kernel>(packs > rest ? packs : rest);
  launch_kernel<kernel>(blocks, stream, "launching cast", static_cast<D*>(dst), static_cast<const S*>(src), count, head,
                        packs);
}

// use.operator()<T>() with the type of a floating dtype.
template <class Use>
void with_float(DType dtype, const Use& use) {
  if (dtype == DType::kFloat16) return use.template operator()<__half>();
  if (dtype == DType::kBFloat16) return use.template operator()<__nv_bfloat16>();
  if (dtype == DType::kFloat32) return use.template operator()<float>();
  use.template operator()<double>();
}

template <class D, class S>
bool load() {
  if constexpr (std::is_same_v<D, S>) {
    return true;  // copied
  } else {
    cudaFuncAttributes found;
    return cudaFuncGetAttributes(&found, &cast_kernel<D, S>) == cudaSuccess;
  }
}
template <class D>
bool load_all() {
  return load<D, __half>() && load<D, __nv_bfloat16>() && load<D, float>() && load<D, double>();
}

}  // namespace

bool load_casts() {
  if (load_all<__half>() && load_all<__nv_bfloat16>() && load_all<float>() && load_all<double>()) return true;
  (void)cudaGetLastError();
  return false;
}

void cast(void* dst, DType dst_type, const void* src, DType src_type, size_t count, void* stream) {
  for (const DType dtype : {src_type, dst_type}) {
    if (is_floating(dtype)) continue;
    throw ArgumentError("cannot cast " + std::string(dtype_name(dtype)) +
                        ": cast converts between float16, bfloat16, float32 and float64");
  }
  if (count == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (src_type == dst_type) {
    if (dst == src) return;
    check(cudaMemcpyAsync(dst, src, count * dtype_bytes(src_type), cudaMemcpyDefault, cuda_stream), "copying");
    return;
  }
  with_float(src_type,
             [&]<class S>() { with_float(dst_type, [&]<class D>() { launch<D, S>(dst, src, count, cuda_stream); }); });
}

}  // namespace dcoll::kernels::cuda
