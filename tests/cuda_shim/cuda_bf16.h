// bfloat16 and its conversions; see cuda_fp16.h.
#pragma once

#include "kernels/reference.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline float __bfloat162float(__nv_bfloat16 x) {
  return static_cast<float>(dcoll::test::decode16(dcoll::test::kBFloatFormat, x.bits));
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  return {std::isnan(x) ? uint16_t{0x7fff} : dcoll::test::encode16(dcoll::test::kBFloatFormat, x)};
}
