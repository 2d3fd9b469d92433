// How the reduce kernels round float16 and bfloat16: every value against operands chosen for trouble, and every pattern
// of the bits that are dropped, against the naive reference.
#include <array>

#include "kernels/reduce.h"
#include "kernels/reference.h"

namespace dcoll {
namespace {

using kernels::reduce_n;

struct SmallFloat {
  DType dtype;
  test::Format16 format;
};
constexpr SmallFloat kSmallFloats[] = {{DType::kFloat16, test::kHalfFormat}, {DType::kBFloat16, test::kBFloatFormat}};

uint16_t infinity_of(const SmallFloat& type) { return static_cast<uint16_t>(0x7fff << type.format.mantissa & 0x7fff); }

using Values = std::vector<uint16_t>;

// Reduces under each instruction set, and compares with `want`.
void check(const SmallFloat& type, ReduceOp op, double scale, const std::vector<Values>& sources, const Values& want) {
  std::vector<const void*> srcs;
  for (const Values& values : sources) srcs.push_back(values.data());
  for (const std::string& isa : test::available_isas()) {
    CHECK(kernels::set_isa(isa));
    Values got(want.size());
    reduce_n(got.data(), srcs, got.size(), type.dtype, op, scale);
    if (got == want) continue;
    for (size_t i = 0; i < got.size(); ++i) {
      if (test::same(type.dtype, reinterpret_cast<const char*>(&got[i]), reinterpret_cast<const char*>(&want[i]))) {
        continue;
      }
      std::string what = isa + " " + std::string(dtype_name(type.dtype)) + " " + std::string(op_name(op)) + " of";
      for (const Values& values : sources) what.append(" ").append(std::to_string(values[i]));
      test::fail(__FILE__, __LINE__,
                 what + " scaled by " + std::to_string(scale) + ": bits " + std::to_string(got[i]) + ", want " +
                     std::to_string(want[i]));
    }
  }
}

// Zeros, subnormals, ones, the largest numbers, infinities, NaNs (quiet, signalling, every payload bit), and a few of
// middling size, of both signs.
Values troublesome(const SmallFloat& type) {
  const uint16_t infinity = infinity_of(type), ulp_of_one = 1;
  const auto one = test::encode16(type.format, 1.0);
  Values values{0, 1, 2, 3, static_cast<uint16_t>((1 << type.format.mantissa) - 1)};
  for (const int at : {1 << type.format.mantissa, one - 1, one + 0, one + ulp_of_one, one + 0x155, infinity - 1,
                       infinity - 2, infinity - (3 << type.format.mantissa), infinity + 0, infinity + 1,
                       infinity + (1 << (type.format.mantissa - 1)), 0x7fff}) {
    values.push_back(static_cast<uint16_t>(at));
  }
  for (size_t i = 0, n = values.size(); i < n; ++i) values.push_back(values[i] | 0x8000);
  return values;
}

TEST(every_value_with_troublesome_operands) {
  for (const SmallFloat& type : kSmallFloats) {
    Values all(65536), want(65536);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    for (const uint16_t operand : troublesome(type)) {
      const Values other(all.size(), operand);
      const float y = static_cast<float>(test::decode16(type.format, operand));
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct}) {
        for (const double scale : {1.0, 0.5, 1.0 / 3}) {
          if (scale != 1.0 && op == ReduceOp::kProduct) continue;
          for (size_t i = 0; i < all.size(); ++i) {
            const float x = static_cast<float>(test::decode16(type.format, all[i]));
            const float combined = op == ReduceOp::kSum ? x + y : x * y;
            const float result = scale == 1.0 ? combined : scale == 0.5 ? combined / 2.0f : combined / 3.0f;
            want[i] = test::encode16(type.format, result);
          }
          check(type, op, scale, {all, other}, want);
        }
      }
    }
  }
}

// x + y + z in float32 is exact, and the bits that float32 has beyond the small type are y's and z's: all of them,
// behind a kept part that is even, odd, and about to carry into the exponent.
TEST(every_pattern_of_dropped_bits) {
  for (const SmallFloat& type : kSmallFloats) {
    const uint32_t patterns = 1u << (23 - type.format.mantissa), last = (1u << type.format.mantissa) - 1;
    for (const uint32_t mantissa : {0u, 1u, 2u, last - 1, last}) {
      for (const double sign : {1.0, -1.0}) {
        std::vector<Values> sources(3, Values(patterns));
        Values want(patterns);
        for (uint32_t dropped = 0; dropped < patterns; ++dropped) {
          const std::array<double, 3> parts{1.0 + std::ldexp(mantissa, -type.format.mantissa),
                                            std::ldexp(dropped >> 8, 8 - 23), std::ldexp(dropped & 0xff, -23)};
          double sum = 0;
          for (size_t s = 0; s < 3; ++s) {
            sources[s][dropped] = test::encode16(type.format, sign * parts[s]);
            CHECK_EQ(test::decode16(type.format, sources[s][dropped]), sign * parts[s]);
            sum += sign * parts[s];
          }
          want[dropped] = test::encode16(type.format, sum);
        }
        check(type, ReduceOp::kSum, 1.0, sources, want);
      }
    }
  }
}

}  // namespace
}  // namespace dcoll

TEST_MAIN
