// The CUDA kernels that add up top-k messages, on the CPU, against their CPU twin.
#include "base/error.h"
#include "cuda/placed.h"
#include "kernels/cuda_status.cu"
#include "kernels/topk.h"
#include "kernels/topk_sum_cuda.cu"

namespace dcoll {
namespace {

using test::Placed;

Placed message_of(bool any_bits, size_t count, size_t k, unsigned seed, size_t misalign) {
  std::mt19937_64 dice(test::seed() + seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(dice);
  if (any_bits) test::fill_random(DType::kFloat32, reinterpret_cast<char*>(values.data()), count, dice);
  Placed message(kernels::top_bytes(count, k), misalign);
  kernels::encode_top(message.data(), values.data(), count, k);
  return message;
}

unsigned sum_top(const Placed& dst, const std::vector<const void*>& messages, size_t count, size_t k, double factor) {
  const Placed scratch(kernels::cuda::sum_top_scratch(count, messages.size()));
  unsigned first_bad = ~0u;
  kernels::cuda::sum_top(dst.floats(), messages, count, k, factor, scratch.data(), &first_bad, nullptr);
  return first_bad;
}

TEST(sums) {
  for (const size_t count : {0, 1, 3, 8191, 8193, 65535, 65536, 65537, 140003}) {
    for (const double factor : {1.0, 0.25, 1.0 / 3, 0.3}) {
      const size_t k = (count + 9) / 10;
      std::vector<Placed> memory;
      std::vector<const void*> messages;
      for (unsigned m = 0; m < 3; ++m) {
        memory.push_back(message_of(m == 1, count, k, m, 4 * m));  // two NaNs would leave either
        messages.push_back(memory.back().data());
      }
      for (const size_t misalign : {0, 4}) {
        const Placed got(4 * count, misalign), want(4 * count);
        CHECK_EQ(sum_top(got, messages, count, k, factor), ~0u);
        CHECK_EQ(kernels::sum_top(want.floats(), messages, count, k, factor), messages.size());
        CHECK(got == want);
      }
    }
  }
}

TEST(damaged_messages_are_refused) {
  constexpr size_t kCount = 70000, kMost = 70;
  const Placed good = message_of(false, kCount, kMost, 1, 0), sum(4 * kCount);
  std::mt19937 dice(test::seed());
  unsigned refused = 0;
  for (int turn = 0; turn < (kSanitized ? 100 : 400); ++turn) {
    const Placed bad(good.data(), good.bytes(), 0);
    for (int flips = 0; flips < 3; ++flips)
      bad.data()[dice() % (turn % 2 == 0 ? 8 : bad.bytes())] = static_cast<char>(dice());
    const std::vector<const void*> both{good.data(), bad.data()};
    const bool is_bad = kernels::sum_top(sum.floats(), both, kCount, kMost) == 1;
    CHECK_EQ(sum_top(sum, both, kCount, kMost, 1), is_bad ? 1u : ~0u);
    refused += is_bad;
  }
  CHECK(refused > 20);
}

TEST(arguments_that_cannot_work_are_refused) {
  float x[4] = {};
  CHECK_THROWS(sum_top(Placed(4), {}, 1, 1, 1), ArgumentError, "1 to 128");
  CHECK_THROWS(sum_top(Placed(4), {reinterpret_cast<char*>(x) + 1}, 1, 1, 1), ArgumentError, "message 0 does not");
}

}  // namespace
}  // namespace dcoll

TEST_MAIN
