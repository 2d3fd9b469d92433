// The vocabulary every layer shares: element types, reduction operators, and the sizes that follow from them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace dcoll {

// Values are part of the Python boundary (dcoll/_C.pyi) and of the fingerprint ranks compare: append, never renumber.
enum class DType : uint8_t {
  kFloat16 = 0,
  kBFloat16 = 1,
  kFloat32 = 2,
  kFloat64 = 3,
  kInt8 = 4,
  kUInt8 = 5,
  kInt32 = 6,
  kInt64 = 7,
  kBool = 8,
  kInt16 = 9,
  kUInt16 = 10,
  kUInt32 = 11,
  kUInt64 = 12,
};
inline constexpr int kNumDTypes = 13;

// The values are Horovod's. Average is a sum whose last reduction is scaled by 1/size; it is not a separate kernel.
// Adasum combines vectors rather than elements (engine/collective/adasum.h): an operator of all-reduce alone. The last
// three combine bits, of integers and bool, and take no scale.
enum class ReduceOp : uint8_t {
  kAverage = 0,
  kSum = 1,
  kAdasum = 2,
  kMin = 3,
  kMax = 4,
  kProduct = 5,
  kBitAnd = 6,
  kBitOr = 7,
  kBitXor = 8,
};
inline constexpr int kNumReduceOps = 9;

constexpr size_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16:
    case DType::kUInt16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
    case DType::kUInt32:
      return 4;
    case DType::kFloat64:
    case DType::kInt64:
    case DType::kUInt64:
      return 8;
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kBool:
      return 1;
  }
  return 0;  // unreachable: every enumerator is handled above, and -Wswitch keeps it so
}

constexpr bool is_floating(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 || dtype == DType::kFloat64;
}

// Whether they combine bits, so that all that matters of a dtype is its size.
constexpr bool is_bitwise(ReduceOp op) { return op >= ReduceOp::kBitAnd; }

// An enumerator's name, from a table in the order of its type; "?" of a number that is none.
template <typename Enum, size_t kCount>
constexpr std::string_view name_in(const std::array<std::string_view, kCount>& names, Enum value) {
  const auto at = static_cast<size_t>(value);
  return at < kCount ? names[at] : "?";
}
std::string_view dtype_name(DType dtype);
std::string_view op_name(ReduceOp op);

// `value` up to the next multiple of `unit`.
constexpr size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace dcoll
