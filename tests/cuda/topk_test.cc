// The CUDA kernels of top-k, on the CPU, against their CPU twins: the same messages and the same feedback.
#include "kernels/topk.h"

#include "base/error.h"
#include "cuda/placed.h"
#include "kernels/cuda_status.cu"
#include "kernels/topk_cuda.cu"

namespace dcoll {
namespace {

using test::Placed;
using Values = std::vector<float>;

enum class Shape { kNormal, kEqual, kFew, kZero, kQuantized, kUniform, kSubnormal, kAnyBits, kShapes };

Values values_of(Shape shape, size_t count, unsigned seed) {
  std::mt19937_64 dice(test::seed() + seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform(-1, 1);
  Values values(count);
  if (shape == Shape::kAnyBits) test::fill_random(DType::kFloat32, reinterpret_cast<char*>(values.data()), count, dice);
  for (float& value : values) {
    const float x = normal(dice);
    if (shape == Shape::kNormal) value = x;
    if (shape == Shape::kEqual) value = x < 0 ? -2.5f : 2.5f;
    if (shape == Shape::kFew) value = dice() % 1000 == 0 ? x : 0;
    if (shape == Shape::kQuantized) value = std::round(x);
    if (shape == Shape::kUniform) value = uniform(dice);
    if (shape == Shape::kSubnormal) value = x * 1e-40f;
  }
  return values;
}

// The state of a rank before and after: on the GPU's side and on the CPU's.
struct Kept {
  Placed error, velocity;
  Kept(size_t count, size_t misalign)
      : error(values_of(Shape::kNormal, count, 2), misalign),
        velocity(values_of(Shape::kQuantized, count, 3), misalign) {}
  kernels::Feedback feedback(int kinds) {
    return {kinds > 0 ? error.floats() : nullptr, kinds > 1 ? velocity.floats() : nullptr, kinds > 1 ? 0.9f : 0};
  }
};

// kinds of feedback: 0, the error, the error and the velocity.
void check_encode(const Values& values, size_t k, int kinds, size_t misalign) {
  const size_t count = values.size(), bytes = kernels::top_bytes(count, k);
  const Placed src(values, misalign), scratch(kernels::cuda::encode_top_scratch(count, k));
  const Placed got(bytes, misalign), want(bytes);
  std::memset(scratch.data(), 0x5a, scratch.bytes());
  Kept kept(count, misalign), twin(count, 0);
  unsigned sent = 77;
  kernels::cuda::encode_top(got.data(), src.floats(), count, k, kept.feedback(kinds), scratch.data(), &sent, nullptr);
  CHECK_EQ(sent, kernels::encode_top(want.data(), src.floats(), count, k, twin.feedback(kinds)));
  CHECK(got == want);
  CHECK(kept.error == twin.error);
  CHECK(kept.velocity == twin.velocity);
}

const std::vector<size_t> kSizes = kSanitized
                                       ? std::vector<size_t>{0, 1, 3, 257, 8193, 65537}
                                       : std::vector<size_t>{0, 1, 3, 255, 257, 1024, 8191, 8193, 65536, 65537, 140003};

TEST(messages_and_feedback) {
  for (const size_t count : kSizes) {
    for (int shape = 0; shape < static_cast<int>(Shape::kShapes); ++shape) {
      const Values values = values_of(static_cast<Shape>(shape), count, 1);
      for (const size_t k : {size_t{0}, size_t{1}, count / 1000, count / 100, count / 3, count}) {
        if (k > count || (kSanitized && k == count / 1000)) continue;
        const int first = count < 10000 ? 0 : static_cast<int>((k + count) % 3);  // one kind alone of large ones
        for (int kinds = first; kinds < (count < 10000 ? 3 : first + 1); ++kinds) {
          check_encode(values, k, kinds, 4 * (k % 2));
        }
      }
    }
  }
}

TEST(infinities_arrive_and_do_not_stay) {
  Values values(20000, 1.0f);
  for (const size_t i : {3, 50, 70, 19999}) values[i] = i == 50 ? NAN : -std::numeric_limits<float>::infinity();
  for (const size_t k : {size_t{0}, size_t{2}, size_t{4}, size_t{5}}) {
    for (int kinds = 0; kinds < 3; ++kinds) check_encode(values, k, kinds, 0);
  }
}

TEST(arguments_that_cannot_work_are_refused) {
  float x[4] = {};
  alignas(16) char memory[64];
  const auto encode = [&](void* message, size_t k, const kernels::Feedback& feedback, void* scratch) {
    kernels::cuda::encode_top(message, x, 1, k, feedback, scratch, nullptr, nullptr);
  };
  CHECK_THROWS(encode(memory, 2, {}, memory), ArgumentError, "k <= count");
  CHECK_THROWS(encode(memory + 1, 1, {}, memory), ArgumentError, "a multiple of 4 bytes");
  CHECK_THROWS(encode(memory, 1, {}, memory + 4), ArgumentError, "at one of 16");
  CHECK_THROWS(encode(memory, 1, {nullptr, x, 1}, memory), ArgumentError, "a velocity with an error");
}

}  // namespace
}  // namespace dcoll

TEST_MAIN
