// The CUDA casts, on the CPU, against their CPU twins.
#include "kernels/cast.h"

#include "base/error.h"
#include "cuda/placed.h"
#include "kernels/cast_cuda.cu"
#include "kernels/cuda_status.cu"

namespace dcoll {
namespace {

using test::Placed;

constexpr DType kFloats[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};

void check(DType to, DType from, size_t count, size_t misalign) {
  std::mt19937_64 random(test::seed() + count);
  const Placed in(count * dtype_bytes(from), misalign * dtype_bytes(from) % 16);
  const Placed got(count * dtype_bytes(to), misalign * dtype_bytes(to) % 16), want(got.bytes());
  test::fill_random(from, in.data(), count, random);
  kernels::cuda::cast(got.data(), to, in.data(), from, count, nullptr);
  kernels::cast(want.data(), to, in.data(), from, count);
  check_same(to, got, want);
  if (dtype_bytes(to) != dtype_bytes(from)) return;
  kernels::cuda::cast(in.data(), to, in.data(), from, count, nullptr);
  check_same(to, in, want);
}

TEST(pairs_sizes_alignments) {
  for (const DType from : kFloats) {
    for (const DType to : kFloats) {
      for (const size_t count : test::kCudaSizes) {
        for (const size_t misalign : {0, 1, 3}) check(to, from, count, misalign);
      }
    }
  }
}

TEST(no_kernel_is_loaded_later) {
  cuda_shim::loaded.clear();
  CHECK(kernels::cuda::load_casts());
  const size_t known = cuda_shim::loaded.size();
  CHECK_EQ(known, std::size(kFloats) * (std::size(kFloats) - 1));
  for (const DType from : kFloats) {
    for (const DType to : kFloats) check(to, from, 100, 0);
  }
  CHECK_EQ(cuda_shim::loaded.size(), known);
}

TEST(integers_are_refused) {
  int32_t x = 1;
  float f = 0;
  CHECK_THROWS(kernels::cuda::cast(&f, DType::kFloat32, &x, DType::kInt32, 1, nullptr), ArgumentError, "int32");
}

}  // namespace
}  // namespace dcoll

TEST_MAIN
