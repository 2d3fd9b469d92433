// float16 and its conversions, by the naive ones of the kernels' tests. A NaN comes out as the GPU makes it: positive,
// all bits set.
#pragma once

#include "kernels/reference.h"

struct __half {
  uint16_t bits;
};
inline uint16_t __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline float __half2float(__half x) {
  return static_cast<float>(dcoll::test::decode16(dcoll::test::kHalfFormat, x.bits));
}
inline __half __float2half_rn(float x) {
  return {std::isnan(x) ? uint16_t{0x7fff} : dcoll::test::encode16(dcoll::test::kHalfFormat, x)};
}
