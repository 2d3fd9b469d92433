// Elements of every dtype from small integers, and back, so that results are compared exactly.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/types.h"
#include "kernels/cast.h"

namespace dcoll::test {

inline constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64, DType::kInt8,
                                    DType::kUInt8,   DType::kInt32,    DType::kInt64,   DType::kBool,    DType::kInt16,
                                    DType::kUInt16,  DType::kUInt32,   DType::kUInt64};

// Of elements; Adasum works on vectors.
inline constexpr ReduceOp kOps[] = {ReduceOp::kSum,     ReduceOp::kAverage, ReduceOp::kMin,   ReduceOp::kMax,
                                    ReduceOp::kProduct, ReduceOp::kBitAnd,  ReduceOp::kBitOr, ReduceOp::kBitXor};

inline bool defined(DType dtype, ReduceOp op) {
  return is_bitwise(op) ? !is_floating(dtype) : dtype != DType::kBool || op != ReduceOp::kAverage;
}

// Of two small integers; the average is a sum until the end.
inline double combine(double a, double b, DType dtype, ReduceOp op) {
  const auto bits_a = static_cast<int64_t>(a), bits_b = static_cast<int64_t>(b);
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return dtype == DType::kBool ? (a != 0 || b != 0) : a + b;
    case ReduceOp::kAdasum:
      break;
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kProduct:
      return a * b;
    case ReduceOp::kBitAnd:
      return static_cast<double>(bits_a & bits_b);
    case ReduceOp::kBitOr:
      return static_cast<double>(bits_a | bits_b);
    case ReduceOp::kBitXor:
      return static_cast<double>(bits_a ^ bits_b);
  }
  return 0;
}

inline std::vector<std::byte> encode(const std::vector<double>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * dtype_bytes(dtype));
  if (is_floating(dtype)) {
    kernels::cast(bytes.data(), dtype, values.data(), DType::kFloat64, values.size());
    return bytes;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const auto value = static_cast<int64_t>(values[i]);  // little-endian: the low bytes come first
    std::memcpy(bytes.data() + i * dtype_bytes(dtype), &value, dtype_bytes(dtype));
  }
  return bytes;
}

inline std::vector<double> decode(const std::byte* bytes, size_t count, DType dtype) {
  std::vector<double> values(count);
  if (is_floating(dtype)) {
    kernels::cast(values.data(), DType::kFloat64, bytes, dtype, count);
    return values;
  }
  for (size_t i = 0; i < count; ++i) {
    const std::byte* at = bytes + i * dtype_bytes(dtype);
    switch (dtype) {
      case DType::kInt8: {
        int8_t v;
        std::memcpy(&v, at, 1);
        values[i] = v;
        break;
      }
      case DType::kUInt8:
      case DType::kBool: {
        uint8_t v;
        std::memcpy(&v, at, 1);
        values[i] = v;
        break;
      }
      case DType::kInt16: {
        int16_t v;
        std::memcpy(&v, at, 2);
        values[i] = v;
        break;
      }
      case DType::kUInt16: {
        uint16_t v;
        std::memcpy(&v, at, 2);
        values[i] = v;
        break;
      }
      case DType::kInt32: {
        int32_t v;
        std::memcpy(&v, at, 4);
        values[i] = v;
        break;
      }
      case DType::kUInt32: {
        uint32_t v;
        std::memcpy(&v, at, 4);
        values[i] = v;
        break;
      }
      case DType::kUInt64: {
        uint64_t v;
        std::memcpy(&v, at, 8);
        values[i] = static_cast<double>(v);
        break;
      }
      case DType::kInt64: {
        int64_t v;
        std::memcpy(&v, at, 8);
        values[i] = static_cast<double>(v);
        break;
      }
      case DType::kFloat16:
      case DType::kBFloat16:
      case DType::kFloat32:
      case DType::kFloat64:
        break;
    }
  }
  return values;
}

}  // namespace dcoll::test
