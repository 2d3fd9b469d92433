// Conversions: all 65536 values of each 16-bit type, the edges of rounding, and every pair of types, sizes, alignments.
#include "kernels/cast.h"

#include "base/error.h"
#include "kernels/reference.h"

namespace dcoll {
namespace {

using kernels::cast;
using test::Guarded;

constexpr DType kFloats[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};

test::Format16 format_of(DType dtype) { return dtype == DType::kFloat16 ? test::kHalfFormat : test::kBFloatFormat; }

template <class To, class From>
std::vector<To> cast_values(DType to, DType from, const std::vector<From>& in) {
  std::vector<To> out(in.size());
  cast(out.data(), to, in.data(), from, in.size());
  return out;
}
template <class Body>
void for_each_isa(Body body) {
  for (const std::string& isa : test::available_isas()) {
    CHECK(kernels::set_isa(isa));
    body();
  }
}
void check_real(double got, double want) {
  if (std::isnan(want)) {
    CHECK(std::isnan(got));
  } else {
    CHECK_EQ(got, want);
    CHECK_EQ(std::signbit(got), std::signbit(want));
  }
}

std::vector<uint16_t> all_16_bit_values() {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  return all;
}

TEST(widening_is_exact_for_every_value) {
  for_each_isa([] {
    const auto all = all_16_bit_values();
    for (const DType from : {DType::kFloat16, DType::kBFloat16}) {
      const auto floats = cast_values<float>(DType::kFloat32, from, all);
      const auto doubles = cast_values<double>(DType::kFloat64, from, all);
      for (size_t i = 0; i < all.size(); ++i) {
        check_real(floats[i], test::decode16(format_of(from), all[i]));
        check_real(doubles[i], test::decode16(format_of(from), all[i]));
      }
    }
  });
}

TEST(every_value_survives_a_round_trip) {
  for_each_isa([] {
    const auto all = all_16_bit_values();
    for (const DType narrow : {DType::kFloat16, DType::kBFloat16}) {
      for (const DType wide : {DType::kFloat32, DType::kFloat64}) {
        std::vector<uint16_t> back(all.size());
        std::vector<char> widened(all.size() * dtype_bytes(wide));
        cast(widened.data(), wide, all.data(), narrow, all.size());
        cast(back.data(), narrow, widened.data(), wide, all.size());
        for (size_t i = 0; i < all.size(); ++i) {
          CHECK(test::same(narrow, reinterpret_cast<const char*>(&back[i]), reinterpret_cast<const char*>(&all[i])));
        }
      }
    }
  });
}

// Every finite value of the narrow type, the midpoint to the next one, and the float32 and float64 just beside each.
TEST(narrowing_rounds_to_nearest_even) {
  for (const DType narrow : {DType::kFloat16, DType::kBFloat16}) {
    const test::Format16 format = format_of(narrow);
    std::vector<float> floats;
    std::vector<double> doubles;
    for (uint32_t bits = 0; bits < 0x8000; ++bits) {
      const double low = test::decode16(format, static_cast<uint16_t>(bits));
      double high = test::decode16(format, static_cast<uint16_t>(bits + 1));
      if (!std::isfinite(low)) break;
      if (std::isinf(high)) high = low + (low - test::decode16(format, static_cast<uint16_t>(bits - 1)));
      for (const double sign : {1.0, -1.0}) {
        for (const double at : {low, (low + high) / 2}) {
          const double infinity = std::numeric_limits<double>::infinity();
          for (const double x : {at, std::nextafter(at, infinity), std::nextafter(at, -infinity)})
            doubles.push_back(sign * x);
          const float f = static_cast<float>(at);
          for (const float x : {f, std::nextafter(f, HUGE_VALF), std::nextafter(f, -HUGE_VALF)}) {
            floats.push_back(static_cast<float>(sign) * x);
          }
        }
      }
    }
    CHECK(doubles.size() > 100000);
    std::vector<uint16_t> want_f, want_d;
    for (const float x : floats) want_f.push_back(test::encode16(format, x));
    for (const double x : doubles) want_d.push_back(test::encode16(format, x));
    for_each_isa([&] {
      CHECK(cast_values<uint16_t>(narrow, DType::kFloat32, floats) == want_f);
      CHECK(cast_values<uint16_t>(narrow, DType::kFloat64, doubles) == want_d);
    });
  }
}

TEST(overflow_infinity_and_nan) {
  for_each_isa([] {
    const double inf = std::numeric_limits<double>::infinity();
    const std::vector<double> in{1e300, -1e300, inf, -inf, 65519.999, 65520.0, 3.4e38, 1e-300, -0.0};
    const std::vector<uint16_t> half{0x7c00, 0xfc00, 0x7c00, 0xfc00, 0x7bff, 0x7c00, 0x7c00, 0, 0x8000};
    const std::vector<uint16_t> brain{0x7f80, 0xff80, 0x7f80, 0xff80, 0x4780, 0x4780, 0x7f80, 0, 0x8000};
    CHECK(cast_values<uint16_t>(DType::kFloat16, DType::kFloat64, in) == half);
    CHECK(cast_values<uint16_t>(DType::kBFloat16, DType::kFloat64, in) == brain);
    CHECK_EQ((cast_values<float>(DType::kFloat32, DType::kFloat64, in)[0]), HUGE_VALF);
    // NaNs whose payload lies only in the bits that narrowing drops, or would carry out of the exponent.
    std::vector<uint32_t> nans{0x7f800001, 0xff800001, 0x7fffffff, 0xffffffff, 0x7f801000, 0x7fc00000};
    std::vector<float> floats(nans.size());
    std::memcpy(floats.data(), nans.data(), nans.size() * 4);
    const std::vector<uint64_t> nan64{0x7ff0000000000001, 0xfff0000000000001, ~0ull};
    std::vector<double> doubles(nan64.size());
    std::memcpy(doubles.data(), nan64.data(), nan64.size() * 8);
    for (const DType narrow : {DType::kFloat16, DType::kBFloat16}) {
      for (const uint16_t x : cast_values<uint16_t>(narrow, DType::kFloat32, floats)) {
        CHECK(std::isnan(test::decode16(format_of(narrow), x)));
      }
      for (const uint16_t x : cast_values<uint16_t>(narrow, DType::kFloat64, doubles)) {
        CHECK(std::isnan(test::decode16(format_of(narrow), x)));
      }
    }
  });
}

TEST(every_isa_gives_the_same_bits) {
  std::mt19937_64 random(test::seed() + 5);
  for (const DType from : kFloats) {
    std::vector<char> in(100000 * dtype_bytes(from));
    test::fill_random(from, in.data(), 100000, random);
    for (const DType to : kFloats) {
      std::vector<char> want(100000 * dtype_bytes(to)), got(want.size());
      CHECK(kernels::set_isa("generic"));
      cast(want.data(), to, in.data(), from, 100000);
      for_each_isa([&] {
        cast(got.data(), to, in.data(), from, 100000);
        CHECK(got == want);
      });
    }
  }
}

TEST(pairs_sizes_alignments) {
  std::mt19937_64 random(test::seed() + 6);
  for (const DType from : kFloats) {
    for (const DType to : kFloats) {
      for (const size_t count : test::kSizes) {
        for (const size_t misalign : {0, 1, 3}) {
          Guarded in(count * dtype_bytes(from), misalign * dtype_bytes(from));
          Guarded want(count * dtype_bytes(to), 0);
          test::fill_random(from, in.data(), count, random);
          for (size_t i = 0; i < count; ++i) {
            test::write(to, want.data() + i * dtype_bytes(to), test::read(from, in.data() + i * dtype_bytes(from)));
          }
          for_each_isa([&] {
            Guarded out(count * dtype_bytes(to), misalign * dtype_bytes(to));
            cast(out.data(), to, in.data(), from, count);
            out.check_guards();
            for (size_t i = 0; i < count * dtype_bytes(to); i += dtype_bytes(to)) {
              CHECK(test::same(to, out.data() + i, want.data() + i));
            }
            if (dtype_bytes(from) != dtype_bytes(to)) return;
            if (count) std::memcpy(out.data(), in.data(), in.bytes());
            cast(out.data(), to, out.data(), from, count);
            for (size_t i = 0; i < count * dtype_bytes(to); i += dtype_bytes(to)) {
              CHECK(test::same(to, out.data() + i, want.data() + i));
            }
          });
        }
      }
    }
  }
}

TEST(integers_are_refused) {
  int32_t x = 1;
  float f = 0;
  CHECK_THROWS(cast(&f, DType::kFloat32, &x, DType::kInt32, 1), ArgumentError, "int32");
  CHECK_THROWS(cast(&x, DType::kBool, &f, DType::kFloat32, 1), ArgumentError, "bool");
}

}  // namespace
}  // namespace dcoll

TEST_MAIN
