// The arithmetic of Adasum (engine/collective/adasum.h): dot products of two vectors, and their weighted sum. Floating
// dtypes only.
//
// float16, bfloat16 and float32 are multiplied and added up in float64: squares of small gradients would otherwise
// underflow, and a long sum lose its low digits. One order of addition whatever the CPU has, so all ranks get the same
// bits.
#pragma once

#include <cstddef>

#include "base/types.h"

namespace dcoll::kernels {

struct Dots {
  double ab = 0;
  double aa = 0;
  double bb = 0;
};
Dots dots(const void* a, const void* b, size_t count, DType dtype);

// dst[i] = a_factor * a[i] + b_factor * b[i], rounded once to float32 (float64 stays), 16-bit types then once more. dst
// may equal a or b exactly.
void weighted_sum(void* dst, const void* a, double a_factor, const void* b, double b_factor, size_t count, DType dtype);

}  // namespace dcoll::kernels
