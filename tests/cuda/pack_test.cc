// The CUDA kernels of pack, on the CPU, against their CPU twins.
#include "kernels/pack.h"

#include "cuda/placed.h"
#include "kernels/cuda_status.cu"
#include "kernels/pack_cuda.cu"

namespace dcoll {
namespace {

using kernels::Segment;
using test::Placed;

// Three times the segments that one launch takes; sizes around a tile; every alignment; every fifth is absent.
struct Layout {
  std::vector<Placed> tensors;
  std::vector<Segment> segments;
  size_t bytes = 0;

  Layout() {
    std::mt19937_64 random(test::seed());
    const size_t sizes[] = {0, 1, 2, 3, 15, 16, 17, 1000, 4099, 4 * 4096, 32767, 32768, 32769, 70001};
    for (size_t i = 0; i < 300; ++i) {
      const size_t size = sizes[i % std::size(sizes)];
      tensors.emplace_back(size, random() % 16);
      test::fill_random(DType::kUInt8, tensors.back().data(), size, random);
      segments.push_back({i % 5 == 4 ? nullptr : tensors.back().data(), bytes, size});
      bytes += size + random() % 4;
    }
  }
};

TEST(pack_then_unpack) {
  for (const size_t misalign : {0, 1, 8}) {
    const Layout layout;
    const Placed got(layout.bytes, misalign), want(layout.bytes);
    kernels::cuda::pack(got.data(), layout.segments, nullptr);
    kernels::pack(want.data(), layout.segments);
    CHECK(got == want);
    const Layout other;
    for (const Placed& tensor : other.tensors) std::memset(tensor.data(), 0x77, tensor.bytes());
    kernels::cuda::unpack(other.segments, got.data(), nullptr);
    for (size_t i = 0; i < other.tensors.size(); ++i) {
      if (other.segments[i].tensor != nullptr) CHECK(other.tensors[i] == layout.tensors[i]);
    }
  }
}

TEST(nothing_to_do) {
  kernels::cuda::pack(nullptr, {}, nullptr);
  const Segment empty[] = {{nullptr, 0, 0}};
  kernels::cuda::pack(nullptr, empty, nullptr);
  kernels::cuda::unpack(empty, nullptr, nullptr);
}

}  // namespace
}  // namespace dcoll

TEST_MAIN
