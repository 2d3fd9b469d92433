// Every dtype x op x size x number of sources x alignment x aliasing x instruction set, against the naive reference.
#include "kernels/reduce.h"

#include <array>
#include <memory>

#include "base/error.h"
#include "kernels/reference.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace dcoll {
namespace {

using kernels::reduce2;
using kernels::reduce_n;
using kernels::reduce_n_to_n;
using test::Guarded;

constexpr size_t kMaxSources = 8;
constexpr size_t kMaxCount = 4099;

// Sources and, for each number of them, the expected result. Element-wise, so every smaller count is a prefix.
struct Expected {
  DType dtype;
  ReduceOp op;
  std::vector<std::vector<char>> sources;
  std::array<double, kMaxSources + 1> scale{};
  std::array<std::vector<char>, kMaxSources + 1> result;

  Expected(DType dtype, ReduceOp op, bool any_bits, std::mt19937_64& random) : dtype(dtype), op(op) {
    const size_t width = dtype_bytes(dtype);
    for (size_t s = 0; s < kMaxSources; ++s) {
      sources.emplace_back(kMaxCount * width);
      (any_bits ? test::fill_random : test::fill_small)(dtype, sources.back().data(), kMaxCount, random);
    }
    std::vector<test::Number> acc(kMaxCount);
    for (size_t p = 1; p <= kMaxSources; ++p) {
      scale[p] = op == ReduceOp::kAverage && dtype != DType::kBool ? 1.0 / static_cast<double>(p) : 1.0;
      result[p].resize(kMaxCount * width);
      for (size_t i = 0; i < kMaxCount; ++i) {
        const test::Number x = test::read(dtype, sources[p - 1].data() + i * width);
        acc[i] = p == 1 ? x : test::combine(dtype, op, acc[i], x);
        test::write(dtype, result[p].data() + i * width, test::scaled(dtype, acc[i], scale[p]));
      }
    }
  }
};

void check_result(const Expected& want, size_t p, size_t count, const Guarded& got, const char* mode) {
  got.check_guards();
  const char* expected = want.result[p].data();
  const size_t width = dtype_bytes(want.dtype);
  if (std::memcmp(got.data(), expected, count * width) == 0) return;
  for (size_t i = 0; i < count; ++i) {
    if (test::same(want.dtype, got.data() + i * width, expected + i * width)) continue;
    const auto bits = [&](const char* from) {
      uint64_t value = 0;
      std::memcpy(&value, from + i * width, width);
      return std::to_string(value);
    };
    test::fail(__FILE__, __LINE__,
               std::string(mode) + " " + std::string(dtype_name(want.dtype)) + " " + std::string(op_name(want.op)) +
                   " isa " + std::string(kernels::active_isa()) + " p=" + std::to_string(p) +
                   " count=" + std::to_string(count) + " at " + std::to_string(i) + ": bits " + bits(got.data()) +
                   ", want " + bits(expected));
  }
}

struct Operands {
  std::vector<std::unique_ptr<Guarded>> memory;
  std::vector<const void*> srcs;
  std::vector<void*> dsts;  // the same memory, to be reduced in place

  // Source s starts `misalign * s` bytes after a 64-byte boundary: with misalign, no two are aligned alike.
  Operands(const Expected& from, size_t p, size_t count, size_t misalign) {
    for (size_t s = 0; s < p; ++s) {
      memory.push_back(std::make_unique<Guarded>(count * dtype_bytes(from.dtype), misalign * (s + 1) % 64));
      if (count) std::memcpy(memory.back()->data(), from.sources[s].data(), memory.back()->bytes());
      srcs.push_back(memory.back()->data());
      dsts.push_back(memory.back()->data());
    }
  }
};

void check_count(const Expected& want, size_t p, size_t count, size_t misalign) {
  const size_t bytes = count * dtype_bytes(want.dtype);
  {
    Operands in(want, p, count, misalign);
    Guarded out(bytes, 0);
    reduce_n(out.data(), in.srcs, count, want.dtype, want.op, want.scale[p]);
    check_result(want, p, count, out, "reduce_n");
    for (size_t s = 0; s < p; ++s) CHECK(std::memcmp(in.srcs[s], want.sources[s].data(), bytes) == 0);
    Guarded other(bytes, misalign);
    void* const outs[] = {out.data(), other.data()};
    reduce_n_to_n(outs, in.srcs, count, want.dtype, want.op, want.scale[p]);
    check_result(want, p, count, out, "reduce_n_to_n, two destinations");
    check_result(want, p, count, other, "reduce_n_to_n, two destinations");
    if (p == 2) {
      reduce2(out.data(), in.srcs[0], in.srcs[1], count, want.dtype, want.op, want.scale[p]);
      check_result(want, p, count, out, "reduce2");
    }
    const size_t target = count % p;  // each source in turn is the destination
    reduce_n(in.dsts[target], in.srcs, count, want.dtype, want.op, want.scale[p]);
    check_result(want, p, count, *in.memory[target], "reduce_n in place");
  }
  Operands in(want, p, count, misalign);
  reduce_n_to_n(in.dsts, in.srcs, count, want.dtype, want.op, want.scale[p]);
  for (const auto& memory : in.memory) check_result(want, p, count, *memory, "reduce_n_to_n in place");
}

void check_matrix(bool any_bits) {
  std::mt19937_64 random(test::seed() + (any_bits ? 1 : 2));
  for (const DType dtype : test::kDTypes) {
    for (const ReduceOp op : test::kOps) {
      if (!test::defined(dtype, op, 1.0)) continue;
      const Expected want(dtype, op, any_bits, random);
      for (const std::string& isa : test::available_isas()) {
        CHECK(kernels::set_isa(isa));
        for (size_t p = 1; p <= kMaxSources; ++p) {
          for (const size_t count : test::kSizes) {
            for (const size_t misalign : {size_t{0}, dtype_bytes(dtype)}) check_count(want, p, count, misalign);
          }
        }
      }
    }
  }
}

TEST(matrix_small_integers) { check_matrix(false); }
TEST(matrix_any_bits) { check_matrix(true); }

template <class T>
std::vector<T> reduce_values(DType dtype, ReduceOp op, const std::vector<std::vector<T>>& values, double scale = 1.0) {
  std::vector<const void*> srcs;
  for (const auto& v : values) srcs.push_back(v.data());
  std::vector<T> out(values[0].size());
  reduce_n(out.data(), srcs, out.size(), dtype, op, scale);
  return out;
}

// Runs the body under each instruction set.
template <class Body>
void for_each_isa(Body body) {
  for (const std::string& isa : test::available_isas()) {
    CHECK(kernels::set_isa(isa));
    body();
  }
}

TEST(integers_wrap) {
  for_each_isa([] {
    CHECK((reduce_values<int8_t>(DType::kInt8, ReduceOp::kSum, {{127, -128}, {1, -1}}) ==
           std::vector<int8_t>{-128, 127}));
    CHECK((reduce_values<uint8_t>(DType::kUInt8, ReduceOp::kProduct, {{16, 255}, {16, 255}}) ==
           std::vector<uint8_t>{0, 1}));
    CHECK(
        (reduce_values<int32_t>(DType::kInt32, ReduceOp::kSum, {{INT32_MAX}, {1}}) == std::vector<int32_t>{INT32_MIN}));
    CHECK((reduce_values<int64_t>(DType::kInt64, ReduceOp::kSum, {{INT64_MIN}, {-1}}) ==
           std::vector<int64_t>{INT64_MAX}));
    CHECK((reduce_values<int64_t>(DType::kInt64, ReduceOp::kProduct, {{1ll << 40}, {(1ll << 40) + 3}}) ==
           std::vector<int64_t>{static_cast<int64_t>(3ull << 40)}));
  });
}

TEST(integer_average_truncates_toward_zero) {
  for_each_isa([] {
    const double third = 1.0 / 3.0;
    CHECK((reduce_values<int32_t>(DType::kInt32, ReduceOp::kAverage, {{-7, 7, 2, -2}, {0, 1, 0, 0}}, 0.5) ==
           std::vector<int32_t>{-3, 4, 1, -1}));
    CHECK((reduce_values<int8_t>(DType::kInt8, ReduceOp::kAverage, {{-5, 5}, {-3, 3}, {0, 0}}, third) ==
           std::vector<int8_t>{-2, 2}));
    CHECK((reduce_values<int64_t>(DType::kInt64, ReduceOp::kAverage, {{INT64_MIN + 1}, {-1}}, 1.0 / 7) ==
           std::vector<int64_t>{INT64_MIN / 7}));
    CHECK((reduce_values<int32_t>(DType::kInt32, ReduceOp::kMax, {{INT32_MIN}, {INT32_MIN}}, 1.0 / 3) ==
           std::vector<int32_t>{INT32_MIN / 3}));
  });
}

template <class T>
std::vector<T> scale_values(DType dtype, const std::vector<T>& values, double factor) {
  return reduce_values<T>(dtype, ReduceOp::kSum, {values}, factor);
}

TEST(integers_are_multiplied_in_double_and_kept_within_their_type) {
  for_each_isa([] {
    CHECK(
        (scale_values<int8_t>(DType::kInt8, {10, -10, 7, -128, 127}, 0.39) == std::vector<int8_t>{3, -3, 2, -49, 49}));
    CHECK((scale_values<int8_t>(DType::kInt8, {100, -100, 3}, -2.5) == std::vector<int8_t>{-128, 127, -7}));
    CHECK((scale_values<uint8_t>(DType::kUInt8, {100, 200, 1}, 1.5) == std::vector<uint8_t>{150, 255, 1}));
    CHECK((scale_values<uint16_t>(DType::kUInt16, {1, 65535}, -1.0) == std::vector<uint16_t>{0, 0}));
    CHECK((scale_values<int16_t>(DType::kInt16, {32767, -5}, 0.999) == std::vector<int16_t>{32734, -4}));
    CHECK((scale_values<int32_t>(DType::kInt32, {INT32_MAX, INT32_MIN}, 1e30) ==
           std::vector<int32_t>{INT32_MAX, INT32_MIN}));
    CHECK((scale_values<int64_t>(DType::kInt64, {INT64_MAX, INT64_MIN, 3}, 1.0000001) ==
           std::vector<int64_t>{INT64_MAX, INT64_MIN, 3}));
    CHECK((scale_values<uint32_t>(DType::kUInt32, {4000000000u, 3}, 0.5) == std::vector<uint32_t>{2000000000u, 1}));
    CHECK((scale_values<uint32_t>(DType::kUInt32, {4000000000u, 1}, 1.5) == std::vector<uint32_t>{UINT32_MAX, 1}));
    CHECK(
        (scale_values<uint64_t>(DType::kUInt64, {~uint64_t{0}, 3}, 0.5) == std::vector<uint64_t>{~uint64_t{0} / 2, 1}));
    CHECK((scale_values<uint64_t>(DType::kUInt64, {1ull << 63, 7}, 2.5) == std::vector<uint64_t>{UINT64_MAX, 17}));
    CHECK((scale_values<int64_t>(DType::kInt64, {49, 48, -49}, 1.0 / 49) == std::vector<int64_t>{1, 0, -1}));
  });
}

// What the reference says, of any bits and every integer type.
TEST(integer_scales_of_any_bits) {
  std::mt19937_64 random(test::seed());
  for (const DType dtype : test::kDTypes) {
    if (is_floating(dtype) || dtype == DType::kBool) continue;
    const size_t width = dtype_bytes(dtype), count = 1000;
    std::vector<char> in(count * width), out(count * width), want(count * width);
    test::fill_random(dtype, in.data(), count, random);
    for (const double factor : {0.3, -0.7, 2.0, 1.0 / 3, 1e-30, -1e30}) {
      for (size_t i = 0; i < count; ++i) {
        const test::Number value = test::read(dtype, in.data() + i * width);
        test::write(dtype, want.data() + i * width, test::scaled(dtype, value, factor));
      }
      for_each_isa([&] {
        kernels::scale(out.data(), in.data(), count, dtype, factor);
        CHECK(out == want);
      });
    }
  }
}

// All pairs (value, divisor) of 8 bits: the division goes through float.
TEST(eight_bit_division_is_exact) {
  for_each_isa([] {
    for (int divisor = 2; divisor <= 300; ++divisor) {
      std::vector<int8_t> signed_in(256), signed_out(256);
      std::vector<uint8_t> unsigned_in(256), unsigned_out(256);
      for (int i = 0; i < 256; ++i)
        signed_in[i] = static_cast<int8_t>(i - 128), unsigned_in[i] = static_cast<uint8_t>(i);
      kernels::scale(signed_out.data(), signed_in.data(), 256, DType::kInt8, 1.0 / divisor);
      kernels::scale(unsigned_out.data(), unsigned_in.data(), 256, DType::kUInt8, 1.0 / divisor);
      for (int i = 0; i < 256; ++i) {
        CHECK_EQ(signed_out[i], (i - 128) / divisor);
        CHECK_EQ(unsigned_out[i], i / divisor);
      }
    }
  });
}

TEST(sixteen_bit_division_is_exact) {
  std::vector<int16_t> signed_in(65536), signed_out(65536);
  std::vector<uint16_t> unsigned_in(65536), unsigned_out(65536);
  for (int i = 0; i < 65536; ++i) {
    signed_in[i] = static_cast<int16_t>(i - 32768);
    unsigned_in[i] = static_cast<uint16_t>(i);
  }
  for_each_isa([&] {
    for (const int divisor : {2, 3, 5, 7, 49, 127, 255, 257, 1000, 10007, 32767, 65535, 65537, 1 << 24, 99999999}) {
      kernels::scale(signed_out.data(), signed_in.data(), 65536, DType::kInt16, 1.0 / divisor);
      kernels::scale(unsigned_out.data(), unsigned_in.data(), 65536, DType::kUInt16, 1.0 / divisor);
      for (int i = 0; i < 65536; ++i) {
        CHECK_EQ(signed_out[i], (i - 32768) / divisor);
        CHECK_EQ(unsigned_out[i], i / divisor);
      }
    }
  });
}

// Multiples of the divisor and their neighbours, where a quotient rounded up would show.
TEST(int32_division_is_exact) {
  for_each_isa([] {
    for (const int32_t divisor : {2, 3, 5, 7, 10, 127, 1000, 65535, 65537, 1 << 20, 999999937, INT32_MAX}) {
      std::vector<int32_t> in, out;
      for (int64_t k = -40; k <= 40; ++k) {
        for (const int64_t base : {k, INT32_MAX / divisor + k}) {
          for (int64_t d = -1; d <= 1; ++d) in.push_back(static_cast<int32_t>(base * divisor + d));
        }
      }
      out.resize(in.size());
      kernels::scale(out.data(), in.data(), in.size(), DType::kInt32, 1.0 / divisor);
      for (size_t i = 0; i < in.size(); ++i) CHECK_EQ(out[i], in[i] / divisor);
    }
  });
}

TEST(min_and_max_propagate_nan_from_any_source) {
  for_each_isa([] {
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      for (size_t where = 0; where < 3; ++where) {
        std::vector<std::vector<float>> f(3, std::vector<float>(40, 1.0f));
        std::vector<std::vector<double>> d(3, std::vector<double>(40, -1.0));
        std::vector<std::vector<uint16_t>> h(3, std::vector<uint16_t>(40, 0x3c00)),
            b(3, std::vector<uint16_t>(40, 0x3f80));
        f[where][33] = std::nanf("");
        d[where][33] = std::nan("");
        h[where][33] = 0x7e00;
        b[where][33] = 0xffc1;
        CHECK(std::isnan(reduce_values(DType::kFloat32, op, f)[33]));
        CHECK(std::isnan(reduce_values(DType::kFloat64, op, d)[33]));
        CHECK(std::isnan(test::decode16(test::kHalfFormat, reduce_values(DType::kFloat16, op, h)[33])));
        CHECK(std::isnan(test::decode16(test::kBFloatFormat, reduce_values(DType::kBFloat16, op, b)[33])));
        CHECK_EQ(reduce_values(DType::kFloat32, op, f)[32], 1.0f);
      }
    }
  });
}

TEST(bool_is_or_and_and) {
  for_each_isa([] {
    const std::vector<std::vector<uint8_t>> v{{0, 0, 1, 1}, {0, 1, 0, 1}};
    const std::vector<uint8_t> either{0, 1, 1, 1}, both{0, 0, 0, 1};
    CHECK(reduce_values(DType::kBool, ReduceOp::kSum, v) == either);
    CHECK(reduce_values(DType::kBool, ReduceOp::kMax, v) == either);
    CHECK(reduce_values(DType::kBool, ReduceOp::kProduct, v) == both);
    CHECK(reduce_values(DType::kBool, ReduceOp::kMin, v) == both);
    // Summing more often than a byte counts must not wrap to false.
    std::vector<std::vector<uint8_t>> ones(256, std::vector<uint8_t>(3, 1));
    CHECK(reduce_values(DType::kBool, ReduceOp::kSum, ones) == std::vector<uint8_t>(3, 1));
  });
}

// 2048 + 1 rounds back to 2048 in float16, so rounding after each source would lose all the ones; likewise 256 in
// bfloat16.
TEST(sixteen_bit_floats_round_once) {
  for_each_isa([] {
    std::vector<std::vector<uint16_t>> half(5, std::vector<uint16_t>(20, 0x3c00)),
        brain(5, std::vector<uint16_t>(20, 0x3f80));
    half[0].assign(20, 0x6800);
    brain[0].assign(20, 0x4380);
    CHECK_EQ(reduce_values(DType::kFloat16, ReduceOp::kSum, half)[19], 0x6802);    // 2052
    CHECK_EQ(reduce_values(DType::kBFloat16, ReduceOp::kSum, brain)[19], 0x4382);  // 260
    // Above 65504 on the way, back in range by the scale.
    CHECK_EQ((reduce_values<uint16_t>(DType::kFloat16, ReduceOp::kAverage, {{0x7bff}, {0x7bff}}, 0.5)[0]), 0x7bff);
  });
}

// ((a + b) + c) differs from (a + (b + c)) here.
TEST(sources_are_combined_in_order) {
  for_each_isa([] {
    const std::vector<std::vector<float>> v(1, std::vector<float>(9, 0x1p24f));
    auto sources = v;
    sources.push_back(std::vector<float>(9, 1.0f));
    sources.push_back(std::vector<float>(9, 1.0f));
    CHECK_EQ(reduce_values(DType::kFloat32, ReduceOp::kSum, sources)[8], 0x1p24f);
    std::swap(sources[0], sources[2]);
    CHECK_EQ(reduce_values(DType::kFloat32, ReduceOp::kSum, sources)[8], 0x1p24f + 2.0f);
  });
}

TEST(scale_applies_to_every_op_and_dtype) {
  std::mt19937_64 random(test::seed() + 3);
  for (const DType dtype : test::kDTypes) {
    if (dtype == DType::kBool) continue;
    const size_t width = dtype_bytes(dtype);
    std::vector<char> a(777 * width), b(777 * width), got(777 * width), want(width);
    test::fill_random(dtype, a.data(), 777, random);
    test::fill_random(dtype, b.data(), 777, random);
    for (const ReduceOp op : test::kOps) {
      for (const double scale : {0.25, 1.0 / 3, 1.0 / 1000, 0.3}) {
        if (scale == 0.3 && !is_floating(dtype)) continue;  // no 1/n
        if (!test::defined(dtype, op, scale)) continue;
        for_each_isa([&] {
          reduce2(got.data(), a.data(), b.data(), 777, dtype, op, scale);
          for (size_t i = 0; i < 777; ++i) {
            const auto sum =
                test::combine(dtype, op, test::read(dtype, &a[i * width]), test::read(dtype, &b[i * width]));
            test::write(dtype, want.data(), test::scaled(dtype, sum, scale));
            CHECK(test::same(dtype, &got[i * width], want.data()));
          }
        });
      }
    }
  }
}

TEST(scale_of_one_keeps_every_bit) {
  std::mt19937_64 random(test::seed() + 4);
  for (const DType dtype : test::kDTypes) {
    std::vector<char> in(300 * dtype_bytes(dtype)), out(in.size());
    test::fill_random(dtype, in.data(), 300, random);
    kernels::scale(out.data(), in.data(), 300, dtype, 1.0);
    CHECK(in == out);
  }
}

TEST(nan_scale_gives_nan) {
  for_each_isa([] {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
      std::vector<char> in(40 * dtype_bytes(dtype)), out(in.size());
      for (size_t i = 0; i < 40; ++i) test::write(dtype, &in[i * dtype_bytes(dtype)], {1.5, 0});
      double nan;
      const uint64_t all_ones = 0x7fffffffffffffff;
      std::memcpy(&nan, &all_ones, sizeof(nan));
      kernels::scale(out.data(), in.data(), 40, dtype, nan);
      for (size_t i = 0; i < 40; ++i) CHECK(std::isnan(test::read(dtype, &out[i * dtype_bytes(dtype)]).real));
    }
  });
}

TEST(count_zero_touches_nothing) {
  const void* const nothing[] = {nullptr, nullptr};
  for_each_isa([&] {
    for (const DType dtype : test::kDTypes) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin}) reduce_n(nullptr, nothing, 0, dtype, op);
    }
  });
}

TEST(arguments_that_cannot_work_are_refused) {
  int32_t a = 6, out = 0;
  bool b = true;
  const std::span<const void* const> none;
  CHECK_THROWS(reduce_n(&out, none, 1, DType::kInt32, ReduceOp::kSum), ArgumentError, "at least one source");
  CHECK_THROWS(kernels::scale(&out, &a, 1, DType::kInt32, HUGE_VAL), ArgumentError, "int32 can only");
  CHECK_THROWS(kernels::scale(&out, &a, 1, DType::kInt32, std::nan("")), ArgumentError, "finite factor");
  CHECK_THROWS(kernels::scale(&b, &b, 1, DType::kBool, 0.5), ArgumentError, "bool");
  float f = 0;
  CHECK_THROWS(reduce2(&f, &f, &f, 1, DType::kFloat32, ReduceOp::kBitAnd), ArgumentError, "integers or bool");
  CHECK_THROWS(reduce2(&out, &a, &a, 1, DType::kInt32, ReduceOp::kBitXor, 0.5), ArgumentError, "cannot be scaled");
  CHECK_EQ(out, 0);
}

#if defined(__SSE2__)
// torch.set_flush_denormal(True) is one thread's: the bits of a sum must not depend on which thread made it.
TEST(flushing_of_subnormals_is_put_aside) {
  constexpr unsigned kFlush = 0x8040;
  const unsigned before = _mm_getcsr();
  for (const std::string& isa : test::available_isas()) {
    kernels::set_isa(isa);
    std::vector<float> a(100, 0x1p-149f), b(100, 0x1p-148f), out(100);
    _mm_setcsr(before | kFlush);
    reduce2(out.data(), a.data(), b.data(), out.size(), DType::kFloat32, ReduceOp::kSum);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    CHECK_EQ(after & kFlush, kFlush);
    for (const float x : out) CHECK(x == 0x1.8p-148f);
  }
}
#endif

TEST(unknown_isa_is_refused) {
  const std::string before(kernels::active_isa());
  CHECK(!kernels::set_isa("sse9"));
  CHECK(!kernels::set_isa(""));
  CHECK_EQ(std::string(kernels::active_isa()), before);
  CHECK(kernels::set_isa("generic"));
  CHECK_EQ(std::string(kernels::active_isa()), std::string("generic"));
}

}  // namespace
}  // namespace dcoll

TEST_MAIN
