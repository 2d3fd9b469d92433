// The `scale` argument of the kernels, checked and prepared for a dtype. Shared by the CPU kernels and their CUDA
// twins.
#pragma once

#include "kernels/dispatch.h"

namespace dcoll::kernels {

// Throws ArgumentError when the dtype cannot be scaled like that: bool by anything but 1, integers by what is not
// finite.
Scale prepare_scale(DType dtype, double scale);

// Whether the operator takes the dtype and the scale; ArgumentError if not.
void check_operator(DType dtype, ReduceOp op, double scale);

}  // namespace dcoll::kernels
