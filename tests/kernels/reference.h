// The kernels' contract, written out naively: one element at a time, floating point through double, integers modulo
// 2^64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/types.h"
#include "kernels/reduce.h"
#include "support/check.h"

namespace dcoll::test {

// An IEEE-like 16-bit format: `mantissa` bits, and the exponent of its smallest normal number.
struct Format16 {
  int mantissa;
  int min_exponent;
};
inline constexpr Format16 kHalfFormat{10, -14};
inline constexpr Format16 kBFloatFormat{7, -126};

inline double decode16(Format16 format, uint16_t bits) {
  const int exponent_bits = 15 - format.mantissa;
  const int field = (bits >> format.mantissa) & ((1 << exponent_bits) - 1);
  const int fraction = bits & ((1 << format.mantissa) - 1);
  double value;
  if (field == (1 << exponent_bits) - 1) {
    value = fraction ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else if (field == 0) {
    value = std::ldexp(fraction, format.min_exponent - format.mantissa);
  } else {
    value = std::ldexp((1 << format.mantissa) + fraction, format.min_exponent + field - 1 - format.mantissa);
  }
  return bits & 0x8000 ? -value : value;
}

// Nearest, ties to even: nearbyint of the value in units of its last place.
inline uint16_t encode16(Format16 format, double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const int exponent_bits = 15 - format.mantissa;
  const uint16_t infinity = static_cast<uint16_t>(((1 << exponent_bits) - 1) << format.mantissa);
  if (std::isnan(value)) return sign | infinity | static_cast<uint16_t>(1 << (format.mantissa - 1));
  const double magnitude = std::fabs(value);
  if (std::isinf(value)) return sign | infinity;
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), format.min_exponent);
  const double units = std::nearbyint(std::ldexp(magnitude, format.mantissa - exponent));
  // `units` has the implicit one of normal numbers, which adds one to the exponent field; so does a carry from
  // rounding.
  const double bits = std::ldexp(exponent - format.min_exponent, format.mantissa) + units;
  return sign | (bits >= infinity ? infinity : static_cast<uint16_t>(bits));
}

struct Number {
  double real = 0;       // floating dtypes
  uint64_t integer = 0;  // integers, sign-extended, and bool
};

template <class T>
T load_as(const char* p) {
  T value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}
template <class T>
void store_as(char* p, T value) {
  std::memcpy(p, &value, sizeof(value));
}

inline Number read(DType dtype, const char* p) {
  switch (dtype) {
    case DType::kFloat16:
      return {decode16(kHalfFormat, load_as<uint16_t>(p)), 0};
    case DType::kBFloat16:
      return {decode16(kBFloatFormat, load_as<uint16_t>(p)), 0};
    case DType::kFloat32:
      return {load_as<float>(p), 0};
    case DType::kFloat64:
      return {load_as<double>(p), 0};
    case DType::kInt8:
      return {0, static_cast<uint64_t>(load_as<int8_t>(p))};
    case DType::kUInt8:
    case DType::kBool:
      return {0, load_as<uint8_t>(p)};
    case DType::kInt16:
      return {0, static_cast<uint64_t>(load_as<int16_t>(p))};
    case DType::kUInt16:
      return {0, load_as<uint16_t>(p)};
    case DType::kUInt32:
      return {0, load_as<uint32_t>(p)};
    case DType::kInt32:
      return {0, static_cast<uint64_t>(load_as<int32_t>(p))};
    case DType::kInt64:
    case DType::kUInt64:
      return {0, load_as<uint64_t>(p)};
  }
  return {};
}

inline void write(DType dtype, char* p, Number n) {
  switch (dtype) {
    case DType::kFloat16:
      return store_as(p, encode16(kHalfFormat, n.real));
    case DType::kBFloat16:
      return store_as(p, encode16(kBFloatFormat, n.real));
    case DType::kFloat32:
      return store_as(p, static_cast<float>(n.real));
    case DType::kFloat64:
      return store_as(p, n.real);
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kBool:
      return store_as(p, static_cast<uint8_t>(n.integer));
    case DType::kInt16:
    case DType::kUInt16:
      return store_as(p, static_cast<uint16_t>(n.integer));
    case DType::kInt32:
    case DType::kUInt32:
      return store_as(p, static_cast<uint32_t>(n.integer));
    case DType::kInt64:
    case DType::kUInt64:
      return store_as(p, n.integer);
  }
}

// What the number becomes in the type that the kernels compute in: float32 for the small floating types (rounding a sum
// or product of two float32 through double is rounding once), the integer type itself for integers.
inline Number computed(DType dtype, Number n) {
  if (is_floating(dtype)) return {dtype == DType::kFloat64 ? n.real : static_cast<float>(n.real), 0};
  char wrapped[8];
  write(dtype, wrapped, n);
  return read(dtype, wrapped);
}

inline bool is_signed_integer(DType dtype) {
  return dtype == DType::kInt8 || dtype == DType::kInt16 || dtype == DType::kInt32 || dtype == DType::kInt64;
}

inline double pick(bool first_wins, double a, double b) { return std::isnan(a) || first_wins ? a : b; }

inline Number combine(DType dtype, ReduceOp op, Number a, Number b) {
  const bool less = is_signed_integer(dtype) ? static_cast<int64_t>(a.integer) < static_cast<int64_t>(b.integer)
                                             : a.integer < b.integer;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      if (dtype == DType::kBool) return {0, a.integer | b.integer};
      return computed(dtype, {a.real + b.real, a.integer + b.integer});
    case ReduceOp::kProduct:
      return computed(dtype, {a.real * b.real, a.integer * b.integer});
    case ReduceOp::kAdasum:
      break;
    case ReduceOp::kBitAnd:
      return {0, a.integer & b.integer};
    case ReduceOp::kBitOr:
      return {0, a.integer | b.integer};
    case ReduceOp::kBitXor:
      return {0, a.integer ^ b.integer};
    case ReduceOp::kMin:
      return {pick(a.real < b.real, a.real, b.real), less ? a.integer : b.integer};
    case ReduceOp::kMax:
      return {pick(a.real > b.real, a.real, b.real), less ? b.integer : a.integer};
  }
  return {};
}

inline Number scaled(DType dtype, Number n, double scale) {
  if (scale == 1.0) return n;
  const auto divisor = static_cast<double>(std::llround(1.0 / scale));
  if (is_floating(dtype) && 1.0 / divisor == scale) {  // 1/n divides, correctly rounded
    return {dtype == DType::kFloat64 ? n.real / divisor : static_cast<float>(n.real) / static_cast<float>(divisor), 0};
  }
  if (dtype == DType::kFloat64) return {n.real * scale, 0};
  if (is_floating(dtype)) return {static_cast<float>(n.real) * static_cast<float>(scale), 0};
  if (1.0 / divisor == scale) {
    if (!is_signed_integer(dtype)) return {0, n.integer / static_cast<uint64_t>(divisor)};
    return {0, static_cast<uint64_t>(static_cast<int64_t>(n.integer) / static_cast<int64_t>(divisor))};
  }
  const bool is_signed = is_signed_integer(dtype);
  const int bits = static_cast<int>(8 * dtype_bytes(dtype));
  const double most = std::ldexp(1.0, is_signed ? bits - 1 : bits) - 1;  // of int64 2^63, as 2^63 - 1 is no double
  const double value =
      is_signed ? static_cast<double>(static_cast<int64_t>(n.integer)) : static_cast<double>(n.integer);
  const double x = std::trunc(value * scale);
  if (x >= most) return {0, ~0ull >> (is_signed ? 65 - bits : 64 - bits)};
  if (!is_signed) return {0, static_cast<uint64_t>(std::max(x, 0.0))};
  return {0, static_cast<uint64_t>(static_cast<int64_t>(std::max(x, -std::ldexp(1.0, bits - 1))))};
}

// Equal bits, or both NaN: which NaN comes out of an operation on two is left to the hardware.
inline bool same(DType dtype, const char* a, const char* b) {
  if (std::memcmp(a, b, dtype_bytes(dtype)) == 0) return true;
  return is_floating(dtype) && std::isnan(read(dtype, a).real) && std::isnan(read(dtype, b).real);
}

// The variants of this CPU; those it lacks are said, so that a log shows what was not tested.
inline const std::vector<std::string>& available_isas() {
  static const std::vector<std::string> available = [] {
    std::vector<std::string> list;
    const std::string active(kernels::active_isa());
    for (const char* isa : {"generic", "avx2", "avx512", "avx512vnni"}) {
      if (kernels::set_isa(isa)) {
        list.push_back(isa);
      } else {
        lacks(isa, "this CPU or this build lacks " + std::string(isa));
      }
    }
    kernels::set_isa(active);
    return list;
  }();
  return available;
}

// Bytes at a chosen misalignment, with guards around them that show a write out of bounds.
class Guarded {
 public:
  Guarded(size_t bytes, size_t misalign)
      : bytes_(bytes), start_(kGuard + misalign), memory_(bytes + 2 * kGuard + 64, kMark) {
    start_ += (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64) % 64;
  }
  char* data() { return reinterpret_cast<char*>(memory_.data()) + start_; }
  const char* data() const { return reinterpret_cast<const char*>(memory_.data()) + start_; }
  size_t bytes() const { return bytes_; }
  void check_guards() const {
    for (size_t i = 0; i < memory_.size(); ++i) CHECK((i >= start_ && i < start_ + bytes_) || memory_[i] == kMark);
  }

 private:
  static constexpr size_t kGuard = 64;
  static constexpr unsigned char kMark = 0xa5;
  size_t bytes_, start_;
  std::vector<unsigned char> memory_;
};

inline constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64, DType::kInt8,
                                    DType::kUInt8,   DType::kInt32,    DType::kInt64,   DType::kBool,    DType::kInt16,
                                    DType::kUInt16,  DType::kUInt32,   DType::kUInt64};
inline constexpr ReduceOp kOps[] = {ReduceOp::kSum,     ReduceOp::kAverage, ReduceOp::kMin,   ReduceOp::kMax,
                                    ReduceOp::kProduct, ReduceOp::kBitAnd,  ReduceOp::kBitOr, ReduceOp::kBitXor};

// Whether the operator takes the dtype, with the scale.
inline bool defined(DType dtype, ReduceOp op, double scale) {
  if (is_bitwise(op)) return !is_floating(dtype) && scale == 1.0;
  return dtype != DType::kBool || scale == 1.0;
}
inline constexpr size_t kSizes[] = {0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 1000, 4099};

// Any bit pattern, with many NaNs, infinities, subnormals and integers about to overflow; bool holds 0 or 1.
inline void fill_random(DType dtype, char* p, size_t count, std::mt19937_64& random) {
  static constexpr uint64_t kEdges[] = {0,
                                        1,
                                        0x7c00,
                                        0xfc01,
                                        0x7fff,
                                        0x8000,
                                        0x7f80,
                                        0xff80,
                                        0x7f800000,
                                        0xff800001,
                                        0x00000001,
                                        0x80000000,
                                        0x7fffffff,
                                        ~0ull,
                                        1ull << 63,
                                        ~0ull >> 1,
                                        0x7ff0000000000000,
                                        0xfff0000000000001};
  for (size_t i = 0; i < count; ++i) {
    const uint64_t draw = random();
    const uint64_t bits = draw % 4 == 0 ? kEdges[draw / 4 % std::size(kEdges)] : draw >> 3;
    if (dtype == DType::kBool) {
      p[i] = static_cast<char>(bits & 1);
    } else {
      std::memcpy(p + i * dtype_bytes(dtype), &bits, dtype_bytes(dtype));
    }
  }
}

// Small integers, of which sums and products of a few are exact.
inline void fill_small(DType dtype, char* p, size_t count, std::mt19937_64& random) {
  for (size_t i = 0; i < count; ++i) {
    const int64_t value = static_cast<int64_t>(random() % 9) - (is_signed_integer(dtype) || is_floating(dtype) ? 4 : 0);
    const uint64_t integer = dtype == DType::kBool ? static_cast<uint64_t>(value & 1) : static_cast<uint64_t>(value);
    write(dtype, p + i * dtype_bytes(dtype), {static_cast<double>(value), integer});
  }
}

}  // namespace dcoll::test
