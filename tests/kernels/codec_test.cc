// Encoded forms against naive twins, with the same bits from every instruction set.
#include "kernels/codec.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "base/error.h"
#include "kernels/cast.h"
#include "kernels/reduce.h"
#include "kernels/reference.h"

namespace dcoll {
namespace {

using kernels::Codec;
using kernels::Encoding;

constexpr Codec kCodecs[] = {Codec::kFloat16, Codec::kBFloat16, Codec::kInt8, Codec::kFloat32};
constexpr float kInfinity = std::numeric_limits<float>::infinity();
const std::vector<size_t> kSizes = {0, 1, 7, 255, 256, 257, 511, 512, 2047, 2048, 2049, 5000};

std::vector<float> some_values(size_t count, unsigned seed) {
  std::mt19937 dice(seed);
  std::normal_distribution<float> value;
  std::vector<float> values(count);
  for (float& v : values) v = value(dice) * std::exp2(static_cast<float>(static_cast<int>(dice() % 40) - 20));
  return values;
}

std::vector<char> encoded(Codec codec, const std::vector<float>& values, std::vector<float>* error = nullptr) {
  std::vector<char> wire(kernels::encoded_bytes(codec, values.size()) + 1, 'x');
  if (error != nullptr) error->assign(values.size(), 0.0f);
  kernels::encode(codec, wire.data(), values.data(), values.size(), error == nullptr ? nullptr : error->data());
  CHECK_EQ(wire.back(), 'x');
  wire.pop_back();
  return wire;
}

std::vector<float> decoded(Codec codec, const std::vector<char>& wire, size_t count) {
  std::vector<float> values(count);
  kernels::decode(codec, values.data(), wire.data(), count);
  return values;
}

// The definition, a block at a time, in the order of the text of codec.h.
std::vector<float> naive_int8(const std::vector<float>& values) {
  std::vector<float> result(values.size());
  for (size_t begin = 0; begin < values.size(); begin += 256) {
    const size_t end = std::min(values.size(), begin + 256);
    float greatest = 0;
    bool finite = true;
    for (size_t i = begin; i < end; ++i) {
      finite = finite && std::isfinite(values[i]);
      greatest = std::max(greatest, std::fabs(values[i]));
    }
    for (size_t i = begin; i < end; ++i) {
      if (!finite) {
        result[i] = NAN;
      } else if (greatest >= 1e-36f) {
        result[i] = std::nearbyint(values[i] * (127.0f / greatest)) * (greatest / 127.0f);
      }
    }
  }
  return result;
}

void check_same(const std::vector<float>& got, const std::vector<float>& want) {
  CHECK_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) CHECK(got[i] == want[i] || (std::isnan(got[i]) && std::isnan(want[i])));
}

void check_against_twins() {
  for (const size_t count : kSizes) {
    const std::vector<float> values = some_values(count, test::seed() + static_cast<unsigned>(count));
    check_same(decoded(Codec::kInt8, encoded(Codec::kInt8, values), count), naive_int8(values));
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      const Codec codec = dtype == DType::kFloat16 ? Codec::kFloat16 : Codec::kBFloat16;
      std::vector<uint16_t> narrow(count);
      std::vector<float> want(count);
      kernels::cast(narrow.data(), dtype, values.data(), DType::kFloat32, count);
      kernels::cast(want.data(), DType::kFloat32, narrow.data(), dtype, count);
      for (float& w : want) w = dtype == DType::kFloat16 && std::isinf(w) ? std::copysign(65504.0f, w) : w;
      check_same(decoded(codec, encoded(codec, values), count), want);
    }
  }
}

void check_errors_and_sums() {
  for (const Codec codec : kCodecs) {
    for (const size_t count : kSizes) {
      const std::vector<float> a = some_values(count, test::seed()), b = some_values(count, test::seed() + 1);
      std::vector<float> error;
      const std::vector<char> wire_a = encoded(codec, a, &error), wire_b = encoded(codec, b);
      const std::vector<float> from_a = decoded(codec, wire_a, count), from_b = decoded(codec, wire_b, count);
      for (size_t i = 0; i < count; ++i) CHECK_EQ(error[i], a[i] - from_a[i]);
      std::vector<float> again(count);
      for (size_t i = 0; i < count; ++i) again[i] = a[i] + error[i];
      std::vector<char> wire_again(wire_a.size());
      kernels::encode(codec, wire_again.data(), a.data(), count, error.data());
      CHECK(wire_again == encoded(codec, again));
      std::vector<float> sum(count), left(count, 0.25f);
      for (size_t i = 0; i < count; ++i) sum[i] = (from_a[i] + from_b[i]) * 0.5f;
      std::vector<char> wire(wire_a.size());
      const void* const both[] = {wire_a.data(), wire_b.data()};
      kernels::sum_encoded(codec, wire.data(), both, count, 0.5, left.data());
      CHECK(wire == encoded(codec, sum));
      const std::vector<float> result = decoded(codec, wire, count);
      for (size_t i = 0; i < count; ++i) CHECK_EQ(left[i], 0.25f + (sum[i] - result[i]) * 2.0f);
    }
  }
}

void check_edges() {
  const std::vector<float> edges = {65504, -65504, 65520, -1e30f, kInfinity, -kInfinity, 1e-45f, -0.0f};
  std::vector<uint16_t> wire(edges.size());
  std::vector<float> error(edges.size());
  CHECK_EQ(kernels::encode(Codec::kFloat16, wire.data(), edges.data(), edges.size(), error.data()), 2u);
  std::vector<float> back(edges.size());
  kernels::decode(Codec::kFloat16, back.data(), wire.data(), edges.size());
  check_same(back, {65504, -65504, 65504, -65504, kInfinity, -kInfinity, 0, 0});
  CHECK(std::signbit(decoded(Codec::kFloat16, encoded(Codec::kFloat16, {-0.0f}), 1)[0]));
  CHECK_EQ(error[2], 16.0f);
  CHECK_EQ(error[4], 0.0f);  // infinity would be in every sum from now on
  check_same(decoded(Codec::kInt8, encoded(Codec::kInt8, {1, kInfinity, 2}, &error), 3), {NAN, NAN, NAN});
  check_same(error, {0, 0, 0});
  check_same(decoded(Codec::kInt8, encoded(Codec::kInt8, {1, NAN}), 2), {NAN, NAN});
  const auto left = [](Codec codec, const std::vector<float>& values, std::vector<float> kept) {
    std::vector<char> wire(kernels::encoded_bytes(codec, values.size()));
    kernels::encode(codec, wire.data(), values.data(), values.size(), kept.data());
    return kept;
  };
  for (const float no_number : {kInfinity, -kInfinity, NAN}) {
    check_same(left(Codec::kInt8, {1, no_number, 2}, {1, 2, 3}), {1, 2, 3});
    check_same(left(Codec::kInt8, {1, 2, 3}, {1, no_number, 3}), {1, 0, 3});
    check_same(left(Codec::kFloat16, {65520, no_number, 1}, {1, 2, 0}), {17, 2, 0});
    std::vector<float> two_blocks(300, 127.25f), kept(300, 1.0f);
    two_blocks[7] = no_number;
    kept = left(Codec::kInt8, two_blocks, kept);
    for (size_t i = 0; i < kept.size(); ++i) CHECK(i < 256 ? kept[i] == 1 : std::fabs(kept[i]) < 0.01f);
  }
  check_same(decoded(Codec::kInt8, encoded(Codec::kInt8, {1e-40f, 0, -1e-37f}, &error), 3), {0, 0, 0});
  check_same(error, {1e-40f, 0, -1e-37f});
  constexpr float kMost = std::numeric_limits<float>::max();
  for (const float x : decoded(Codec::kInt8, encoded(Codec::kInt8, {kMost, -kMost}), 2)) CHECK(std::isfinite(x));
}

void check_names() {
  CHECK(!kernels::encoding_named(""));
  for (const Codec codec : kCodecs) CHECK(kernels::encoding_named(kernels::codec_name(codec)) == Encoding{codec});
  for (const Codec codec : kCodecs) {
    const std::string name = "auto " + std::string(kernels::codec_name(codec));
    CHECK(kernels::encoding_named(name) == (Encoding{.codec = codec, .if_it_pays = true}));
    CHECK(kernels::encoding_name(kernels::encoding_named(name)) == name);
  }
  CHECK(kernels::encoding_name(kernels::encoding_named("auto topk 0.25")) == "auto topk 0.25");
  CHECK_THROWS(kernels::encoding_named("auto int4"), ArgumentError, "fp16, bf16, int8");
  const Encoding top = kernels::encoding_named("topk 0.25");
  CHECK((top == Encoding{Codec::kTopK, 0.25f}));
  CHECK(kernels::encoding_name(top) == "topk 0.25");
  const Encoding drawn = kernels::encoding_named("bf16 stochastic");
  CHECK((drawn == Encoding{.codec = Codec::kBFloat16, .stochastic = true}));
  CHECK(kernels::encoding_name(drawn) == "bf16 stochastic");
  CHECK_THROWS(kernels::encoding_named("topk 0.1 stochastic"), ArgumentError, "only fp16, bf16 and int8");
  CHECK_THROWS(kernels::encoding_named("int4"), ArgumentError, "fp16, bf16, int8");
  CHECK_THROWS(kernels::encoding_named("fp16 2"), ArgumentError, "fp16, bf16, int8");
  for (const char* name : {"topk", "topk ", "topk 0", "topk 1.5", "topk -1", "topk nan", "topk 0.1x", "topk 1e-60"}) {
    CHECK_THROWS(kernels::encoding_named(name), ArgumentError, "greater than 0 and at most 1");
  }
}

template <class Body>
void for_each_isa(Body body) {
  for (const std::string& isa : test::available_isas()) {
    CHECK(kernels::set_isa(isa));
    body();
  }
}

TEST(encoded_forms_are_what_naive_twins_make) { for_each_isa(check_against_twins); }
TEST(errors_and_sums_are_exact) { for_each_isa(check_errors_and_sums); }
TEST(edges) { for_each_isa(check_edges); }
TEST(names) { check_names(); }

}  // namespace
}  // namespace dcoll

TEST_MAIN
