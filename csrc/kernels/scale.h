// The `scale` argument of the kernels, checked and prepared for a dtype. Shared by the CPU kernels and their CUDA
// twins.
#pragma once

#include "kernels/dispatch.h"

namespace dcoll::kernels {

// Throws ArgumentError when the dtype cannot be scaled like that: bool by anything but 1, integers by what is not
// finite.
Scale prepare_scale(DType dtype, double scale);

// Throws ArgumentError when the operator does not take the dtype or the scale. Of those that combine bits, and Adasum.
void check_rare_operator(DType dtype, ReduceOp op, double scale);
// Of all.
inline void check_operator(DType dtype, ReduceOp op, double scale) {
  if (op == ReduceOp::kAdasum || is_bitwise(op)) [[unlikely]]
    check_rare_operator(dtype, op, scale);
}

}  // namespace dcoll::kernels
