// The CUDA encoders and decoders, on the CPU, against their CPU twins: the same bytes, errors and counts.
#include "base/error.h"
#include "cuda/placed.h"
#include "kernels/codec_cuda.cu"
#include "kernels/cuda_status.cu"

namespace dcoll {
namespace {

using kernels::Codec;
using test::Placed;
using Values = std::vector<float>;

constexpr Codec kCodecs[] = {Codec::kFloat16, Codec::kBFloat16, Codec::kInt8, Codec::kFloat32};

enum class Shape { kNumbers, kBeyondHalf, kAnyBits, kTiny, kShapes };

// Any bits are for one operand of each sum: two NaNs leave either.
Values values_of(Shape shape, size_t count, unsigned seed) {
  std::mt19937_64 random(test::seed() + seed);
  std::normal_distribution<float> normal;
  Values values(count);
  if (shape == Shape::kAnyBits)
    test::fill_random(DType::kFloat32, reinterpret_cast<char*>(values.data()), count, random);
  for (float& x : values) {
    if (shape == Shape::kNumbers) x = std::ldexp(normal(random), static_cast<int>(random() % 40) - 20);
    if (shape == Shape::kBeyondHalf) x = normal(random) * 65504;
    if (shape == Shape::kTiny) x = normal(random) * 1e-37f;
  }
  return values;
}

// With a key, values are rounded at random. fp32 rounds nothing, and passes over it.
template <class Body>
void for_each_case(const Body& body) {
  const kernels::Key nearest, keys[] = {nearest, kernels::derived(uint64_t{0}, test::seed())};
  for (const Codec codec : kCodecs) {
    for (int shape = 0; shape < static_cast<int>(Shape::kShapes); ++shape) {
      for (const size_t count : test::kCudaSizes) {
        for (const size_t misalign : {0, 4, 8}) {
          for (const kernels::Key& key : keys) body(codec, static_cast<Shape>(shape), count, misalign, key);
        }
      }
    }
  }
}

TEST(encode_and_decode) {
  for_each_case([](Codec codec, Shape shape, size_t count, size_t misalign, const kernels::Key& key) {
    const Placed src(values_of(shape, count, 1), 12 - misalign);
    const size_t bytes = kernels::encoded_bytes(codec, count);
    const Placed got(bytes, misalign), want(bytes);
    unsigned long long beyond = 5;
    kernels::cuda::encode(codec, got.data(), src.floats(), count, nullptr, &beyond, key, nullptr);
    CHECK_EQ(beyond, 5 + kernels::encode(codec, want.data(), src.floats(), count, nullptr, key));
    CHECK(got == want);
    const Placed back(4 * count, misalign), twin(4 * count);
    kernels::cuda::decode(codec, back.floats(), got.data(), count, nullptr);
    kernels::decode(codec, twin.floats(), got.data(), count);
    CHECK(back == twin);
  });
}

TEST(encode_with_error_feedback) {
  for_each_case([](Codec codec, Shape shape, size_t count, size_t misalign, const kernels::Key& key) {
    const Values numbers = values_of(shape == Shape::kTiny ? shape : Shape::kNumbers, count, 2);
    const Values others = values_of(shape, count, 1);
    for (const bool kept_others : {false, true}) {
      const Placed src(kept_others ? numbers : others, 0);
      const Values& before = kept_others ? others : numbers;
      const Placed error(before, misalign), twin(before, 0);
      const size_t bytes = kernels::encoded_bytes(codec, count);
      const Placed got(bytes, misalign), want(bytes);
      unsigned long long beyond = 0;
      kernels::cuda::encode(codec, got.data(), src.floats(), count, error.floats(), &beyond, key, nullptr);
      CHECK_EQ(beyond, kernels::encode(codec, want.data(), src.floats(), count, twin.floats(), key));
      CHECK(got == want);
      CHECK(error == twin);
    }
  });
}

TEST(sums) {
  for (const double factor : {1.0, 0.5, 1.0 / 3, 0.3}) {
    for_each_case([&](Codec codec, Shape shape, size_t count, size_t misalign, const kernels::Key& key) {
      const size_t bytes = kernels::encoded_bytes(codec, count);
      std::vector<Placed> messages;
      std::vector<const void*> srcs;
      for (unsigned s = 0; s < 3; ++s) {
        const Values values = values_of(s == 1 || shape != Shape::kAnyBits ? shape : Shape::kNumbers, count, 3 + s);
        messages.emplace_back(bytes, misalign);
        kernels::encode(codec, messages.back().data(), values.data(), count);
        srcs.push_back(messages.back().data());
      }
      const Values before = values_of(Shape::kNumbers, count, 7);
      const Placed error(before, misalign), twin(before, 0), want(bytes);
      unsigned long long beyond = 0;
      const size_t counted = kernels::sum_encoded(codec, want.data(), srcs, count, factor, twin.floats(), key);
      kernels::cuda::sum_encoded(codec, messages[0].data(), srcs, count, factor, error.floats(), &beyond, key, nullptr);
      CHECK_EQ(beyond, counted);
      CHECK(messages[0] == want);
      CHECK(error == twin);
    });
  }
}

TEST(every_16_bit_value) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (const Codec codec : {Codec::kFloat16, Codec::kBFloat16}) {
    const Placed got(4 * all.size()), want(4 * all.size());
    kernels::cuda::decode(codec, got.floats(), all.data(), all.size(), nullptr);
    kernels::decode(codec, want.floats(), all.data(), all.size());
    CHECK(got == want);
  }
}

// A step of int8 is 1 here, and values are multiples of 2^-16, which is what is drawn: one in 65536 is at the edge.
TEST(a_million_draws_at_the_edge) {
  std::mt19937_64 random(test::seed());
  Values values(size_t{1} << 20);
  for (float& x : values) x = static_cast<float>(random() % (254u << 16)) * 0x1p-16f - 127;
  for (size_t i = 0; i < values.size(); i += kernels::kCodecBlock) values[i] = 127;
  const size_t bytes = kernels::encoded_bytes(Codec::kInt8, values.size());
  const Placed got(bytes), want(bytes);
  const kernels::Key key = random();
  kernels::cuda::encode(Codec::kInt8, got.data(), values.data(), values.size(), nullptr, nullptr, key, nullptr);
  kernels::encode(Codec::kInt8, want.data(), values.data(), values.size(), nullptr, key);
  CHECK(got == want);
}

TEST(what_cannot_be_encoded_is_refused) {
  float x[2] = {};
  char wire[16];
  CHECK_THROWS(kernels::cuda::encode(Codec::kTopK, wire, x, 1, nullptr, nullptr, {}, nullptr), ArgumentError, "topk");
  CHECK_THROWS(kernels::cuda::decode(Codec::kInt8, x, reinterpret_cast<char*>(x) + 1, 1, nullptr), ArgumentError,
               "a multiple of 4 bytes");
  CHECK_THROWS(kernels::cuda::sum_encoded(Codec::kInt8, wire, {}, 1, 1, nullptr, nullptr, {}, nullptr), ArgumentError,
               "1 to 128");
}

}  // namespace
}  // namespace dcoll

TEST_MAIN
