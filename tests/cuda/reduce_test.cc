// The CUDA kernels of reduce, on the CPU, against their CPU twins: every dtype and operator, alignment and aliasing.
#include "kernels/reduce.h"

#include "base/error.h"
#include "cuda/placed.h"
#include "kernels/cuda_status.cu"
#include "kernels/reduce_cuda.cu"

namespace dcoll {
namespace {

using test::Placed;

struct Operands {
  std::vector<Placed> memory;
  std::vector<const void*> srcs;
  std::vector<void*> dsts;

  // Source s is misaligned by `misalign`, and where `apart`, each differently.
  Operands(DType dtype, size_t p, size_t count, size_t misalign, bool apart) {
    std::mt19937_64 random(test::seed() + p * 1000 + count);
    for (size_t s = 0; s < p; ++s) {
      memory.emplace_back(count * dtype_bytes(dtype), (apart ? s + 1 : 1) * misalign % 16);
      test::fill_random(dtype, memory.back().data(), count, random);
      srcs.push_back(memory.back().data());
      dsts.push_back(memory.back().data());
    }
  }
};

void check(DType dtype, ReduceOp op, size_t p, size_t count, size_t misalign, bool apart) {
  const double scale = op == ReduceOp::kAverage && dtype != DType::kBool ? 1.0 / static_cast<double>(p) : 1.0;
  const size_t bytes = count * dtype_bytes(dtype);
  const Operands in(dtype, p, count, misalign, apart), twin(dtype, p, count, misalign, apart);
  const Placed got(bytes, misalign), want(bytes);
  kernels::cuda::reduce_n(got.data(), in.srcs, count, dtype, op, scale, nullptr);
  kernels::reduce_n(want.data(), in.srcs, count, dtype, op, scale);
  check_same(dtype, got, want);
  if (p == 2) {
    kernels::cuda::reduce2(got.data(), in.srcs[0], in.srcs[1], count, dtype, op, scale, nullptr);
    check_same(dtype, got, want);
  }
  kernels::cuda::reduce_n_to_n(in.dsts, in.srcs, count, dtype, op, scale, nullptr);
  for (const Placed& result : in.memory) check_same(dtype, result, want);
}

TEST(every_dtype_operator_and_alignment) {
  for (const DType dtype : test::kDTypes) {
    for (const ReduceOp op : test::kOps) {
      if (!test::defined(dtype, op, 1.0)) continue;
      for (const size_t p : {1, 2, 3, 5}) {
        for (const size_t count : test::kCudaSizes) {
          if (kSanitized && p == 3) continue;
          check(dtype, op, p, count, 0, false);
          check(dtype, op, p, count, dtype_bytes(dtype), false);
          check(dtype, op, p, count, dtype_bytes(dtype), true);
        }
      }
    }
  }
}

TEST(scales) {
  std::mt19937_64 random(test::seed());
  for (const DType dtype : test::kDTypes) {
    if (dtype == DType::kBool) continue;
    for (const double factor : {0.5, 1.0 / 3, 1.0 / 1000, 0.3, -2.5, 1e30}) {
      for (const size_t count : {size_t{1}, size_t{769}, size_t{3073}}) {
        const Placed in(count * dtype_bytes(dtype)), got(in.bytes()), want(in.bytes());
        test::fill_random(dtype, in.data(), count, random);
        kernels::cuda::scale(got.data(), in.data(), count, dtype, factor, nullptr);
        kernels::scale(want.data(), in.data(), count, dtype, factor);
        check_same(dtype, got, want);
      }
    }
  }
}

TEST(as_many_sources_as_a_launch_takes) {
  const Operands in(DType::kInt32, kernels::cuda::kMaxPointers, 1000, 0, false);
  const Placed got(4000), want(4000);
  kernels::cuda::reduce_n(got.data(), in.srcs, 1000, DType::kInt32, ReduceOp::kSum, 1.0, nullptr);
  kernels::reduce_n(want.data(), in.srcs, 1000, DType::kInt32, ReduceOp::kSum);
  CHECK(got == want);
  std::vector<const void*> more = in.srcs;
  more.push_back(in.srcs[0]);
  CHECK_THROWS(kernels::cuda::reduce_n(got.data(), more, 1000, DType::kInt32, ReduceOp::kSum, 1.0, nullptr),
               ArgumentError, "1 to 128 sources");
}

// By the first launch of one, for which the driver might wait for a kernel that itself waits for other ranks.
TEST(no_kernel_is_loaded_later) {
  cuda_shim::loaded.clear();
  CHECK(kernels::cuda::load_reductions());
  const size_t known = cuda_shim::loaded.size();
  CHECK(known > 0);
  for (const DType dtype : test::kDTypes) {
    for (const ReduceOp op : test::kOps) {
      if (!test::defined(dtype, op, 1.0)) continue;
      for (const size_t p : {2, 3}) {
        const Operands in(dtype, p, 100, 0, false);
        kernels::cuda::reduce_n_to_n(in.dsts, in.srcs, 100, dtype, op, 1.0, nullptr);
      }
    }
    const Operands in(dtype, 1, 100, 0, false);
    if (dtype != DType::kBool) kernels::cuda::scale(in.dsts[0], in.srcs[0], 100, dtype, 2.0, nullptr);
    CHECK_EQ(std::string(dtype_name(dtype)) + (cuda_shim::loaded.size() > known ? " has more" : ""),
             std::string(dtype_name(dtype)));
  }
}

}  // namespace
}  // namespace dcoll

TEST_MAIN
