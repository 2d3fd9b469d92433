#include "kernels/scale.h"

#include <bit>
#include <cmath>
#include <limits>
#include <string>

#include "base/error.h"

namespace dcoll::kernels {

namespace {

// n, if scale is 1/n for an integer that floats hold exactly and whose reciprocal they do not; else 0. Dividing by n
// gives the rounded average where multiplying by the rounded 1/n does not: the average of three equal numbers is that
// number.
int64_t reciprocal_of(double scale) {
  constexpr double kLargest = 0x1p24;
  if (!(scale > 1.0 / kLargest && scale < 1.0)) return 0;
  const auto n = static_cast<int64_t>(std::llround(1.0 / scale));
  return 1.0 / static_cast<double>(n) == scale && !std::has_single_bit(static_cast<uint64_t>(n)) ? n : 0;
}

}  // namespace

Scale prepare_scale(DType dtype, double scale) {
  if (scale == 1.0) return {false, 1.0, 1};
  if (is_floating(dtype)) {
    if (const int64_t n = reciprocal_of(scale); n != 0) return {true, 1.0, n};
    // A NaN factor becomes the standard NaN: rounding to bfloat16 relies on NaNs having no low bits.
    return {true, std::isnan(scale) ? std::numeric_limits<double>::quiet_NaN() : scale, 1};
  }
  if (dtype == DType::kBool) {
    throw ArgumentError("bool cannot be scaled or averaged (got scale " + std::to_string(scale) +
                        ", allowed is 1): use min, max or sum");
  }
  if (!std::isfinite(scale)) {
    throw ArgumentError(std::string(dtype_name(dtype)) + " can only be scaled by a finite factor (got " +
                        std::to_string(scale) + ")");
  }
  // 1/n divides: the product with the rounded 1/n can lie just below a whole number.
  if (scale > 0x1p-52 && scale < 1.0) {
    const auto divisor = static_cast<int64_t>(std::llround(1.0 / scale));
    if (1.0 / static_cast<double>(divisor) == scale) return {true, 1.0, divisor};
  }
  return {true, scale, 1};
}

void check_rare_operator(DType dtype, ReduceOp op, double scale) {
  if (op == ReduceOp::kAdasum) throw ArgumentError("adasum combines vectors: see kernels/adaptive_sum.h");
  if (is_floating(dtype)) {
    throw ArgumentError(std::string(op_name(op)) + " combines the bits of integers or bool (got " +
                        std::string(dtype_name(dtype)) + ")");
  }
  if (scale != 1.0) {
    throw ArgumentError(std::string(op_name(op)) + " cannot be scaled (got scale " + std::to_string(scale) +
                        ", allowed is 1)");
  }
}

}  // namespace dcoll::kernels
