#include "kernels/scale.h"

#include <cmath>
#include <limits>
#include <string>

#include "base/error.h"

namespace dcoll::kernels {

Scale prepare_scale(DType dtype, double scale) {
  if (scale == 1.0) return {false, 1.0, 1};
  if (is_floating(dtype)) {
    // A NaN factor becomes the standard NaN: rounding to bfloat16 relies on NaNs having no low bits.
    return {true, std::isnan(scale) ? std::numeric_limits<double>::quiet_NaN() : scale, 1};
  }
  if (dtype == DType::kBool) {
    throw ArgumentError("bool cannot be scaled or averaged (got scale " + std::to_string(scale) +
                        ", allowed is 1): use min, max or sum");
  }
  // Beyond 2^62 the divisor is larger than nearly every value; nothing that is meant asks for it.
  if (!(scale > 0.0 && scale < 1.0) || 1.0 / scale > 0x1p62) {
    throw ArgumentError(std::string(dtype_name(dtype)) +
                        " can only be scaled by 1/n for an integer n >= 1 (got scale " + std::to_string(scale) +
                        "): reduce in a floating type to scale by other factors");
  }
  const auto divisor = static_cast<int64_t>(std::llround(1.0 / scale));
  return {divisor != 1, 1.0, divisor};
}

}  // namespace dcoll::kernels
