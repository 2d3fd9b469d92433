// Element-wise reduction on the CPU; its twin in cuda.h has the same contract plus a stream.
//
// Contract, for all kernels here:
//   - `count` elements; 0 is allowed, and then no pointer is touched. No alignment beyond the element's own is assumed.
//   - `dst` may equal `a` or any source exactly; partial overlap is not allowed.
//   - float16 and bfloat16 are combined in float32 and rounded once, to nearest even, when stored.
//   - Integers wrap (two's complement). Bool holds 0 or 1: sum and max are OR, product and min are AND.
//   - Bitwise and, or and xor are of integers and bool, with scale 1.0.
//   - Min and max propagate NaN.
//   - `scale` multiplies the combined value just before it is rounded to the element type; 1.0 leaves it untouched.
//     float16/bfloat16/float32 multiply in float32, float64 in float64; a scale of 1.0/n divides by n, correctly
//     rounded. Integers: a scale of 1.0/n divides by n, truncating toward zero (this is how average is defined for
//     them); by any other, finite scale they are multiplied in float64, truncated and kept within their type. Bool
//     requires scale 1.0.
//   - kAverage is treated as kSum: the caller passes scale = 1/size with the last reduction.
//   - Sources are combined in the order given, ((s0 op s1) op s2)..., so ranks that pass them in rank order get the
//     same bits.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <string_view>

#include "base/types.h"
#include "kernels/dispatch.h"

namespace dcoll::kernels {

// A reduction but for its memory: what can be looked at before the operands are there.
class Reduction {
 public:
  Reduction(DType dtype, ReduceOp op, double scale = 1.0);  // ArgumentError
  // As reduce_n_to_n.
  void run(std::span<void* const> dsts, std::span<const void* const> srcs, size_t count) const;

 private:
  ReduceFn loop_;
  Scale scale_;
  size_t element_bytes_;
  size_t loop_count_;  // of what the loop counts, in an element
};

// dst[i] = (a[i] op b[i]) * scale
void reduce2(void* dst, const void* a, const void* b, size_t count, DType dtype, ReduceOp op, double scale = 1.0);

// dst[i] = (srcs[0][i] op srcs[1][i] op ... ) * scale, one pass, srcs.size() >= 1. 16-bit floats round once, at the
// end.
void reduce_n(void* dst, std::span<const void* const> srcs, size_t count, DType dtype, ReduceOp op, double scale = 1.0);

// As reduce_n, then the result is stored to each of dsts (two-shot all-reduce: read p slices, write p slices, one
// pass). A dst may equal a src exactly.
void reduce_n_to_n(std::span<void* const> dsts, std::span<const void* const> srcs, size_t count, DType dtype,
                   ReduceOp op, double scale = 1.0);

// dst[i] = src[i] * scale
void scale(void* dst, const void* src, size_t count, DType dtype, double scale);
// The same of so many bytes, inline for what is mostly not scaled: then it is a copy.
inline void copy_scaled(void* dst, const void* src, size_t bytes, DType dtype, double factor) {
  if (factor != 1.0) {
    scale(dst, src, bytes / dtype_bytes(dtype), dtype, factor);
  } else if (bytes > 0 && dst != src) {
    std::memcpy(dst, src, bytes);
  }
}

// "avx512vnni", "avx512", "avx2" or "generic": what run-time dispatch chose, or what DCOLL_SIMD asked for.
std::string_view active_isa();
// For tests: force a variant. Returns false, changing nothing, when this CPU or this build lacks it.
bool set_isa(std::string_view isa);

}  // namespace dcoll::kernels
