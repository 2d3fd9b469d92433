// Top-k on the GPU: the contract of topk.h, with the same bytes, plus a stream (see reduce_cuda.h). Messages are
// aligned to 4 bytes here, scratch memory to 16; both are the device's, as are the results that a call leaves there.
#pragma once

#include <cstddef>
#include <span>

#include "kernels/topk.h"

namespace dcoll::kernels::cuda {

// Of scratch memory for encode_top(): 8 bytes for each of k and a sixteenth of the elements, and 1 % or so of the
// operand.
size_t encode_top_scratch(size_t count, size_t k);
// How many elements are sent is written to *sent, unless that is null.
void encode_top(void* message, const float* src, size_t count, size_t k, const Feedback& feedback, void* scratch,
                unsigned* sent, void* stream);

size_t sum_top_scratch(size_t count, size_t messages);
// *first_bad becomes the number of the first message that no encode_top made, if that is less than what it is; dst is
// not defined then.
void sum_top(float* dst, std::span<const void* const> messages, size_t count, size_t k, double factor, void* scratch,
             unsigned* first_bad, void* stream);

}  // namespace dcoll::kernels::cuda
