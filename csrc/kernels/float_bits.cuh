// float32 arithmetic on the GPU with the bits of the CPU's. What is finite is equal anyway, where nothing is fused:
// these are calls, which nvcc fuses with nothing. A NaN would be 0x7fffffff whatever it came from; here it is the
// operand's, made quiet, and of two infinities the one that x86 makes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/dispatch.h"

namespace dcoll::kernels::cuda {

inline constexpr uint32_t kInfinityBits = 0x7f800000, kQuietBit = 0x400000;

__device__ inline uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffff; }

__device__ inline float result_of(float a, float b, float result) {
  if (result == result) return result;
  const uint32_t bits = a != a ? __float_as_uint(a) : b != b ? __float_as_uint(b) : 0xff800000;
  return __uint_as_float(bits | kQuietBit);
}
__device__ inline float add(float a, float b) { return result_of(a, b, __fadd_rn(a, b)); }
__device__ inline float multiply(float a, float b) { return result_of(a, b, __fmul_rn(a, b)); }
__device__ inline float scaled_bits(float x, const Scale& scale) {
  if (!scale.active) return x;
  if (scale.divisor == 1) return multiply(x, static_cast<float>(scale.factor));
  const auto divisor = static_cast<float>(scale.divisor);
  return result_of(x, divisor, __fdiv_rn(x, divisor));
}

}  // namespace dcoll::kernels::cuda
