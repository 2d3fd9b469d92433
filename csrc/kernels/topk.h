// Top-k: the k elements of greatest magnitude out of `count` float32, and the message in which they travel.
//
// Magnitudes are compared by their bits, so NaN comes before infinity and infinity before numbers; of equal ones the
// first is taken. Zeros are not sent, so a message may have fewer than k. What is chosen depends neither on the
// instruction set nor on how it is found.
//
// A message is top_bytes(count, k) long, whatever is in it: for each 65536 elements, a block, a uint32, how many of
// them there are; a uint16 for each, its place in its block, block after block and ascending; padding to 4 bytes; a
// float32 for each, its value. What is left is zeros.
#pragma once

#include <cstddef>
#include <span>

#include "kernels/codec.h"

namespace dcoll::kernels {

// Of a ratio: rounded to nearest, at least one of any.
size_t top_count(size_t count, float ratio);
size_t top_bytes(size_t count, size_t k);

// The message of src, or, with feedback, of what is added up there. What is sent leaves the
// feedback; the rest stays in it, but for infinities and NaN, which would never leave. Returns how many are sent.
// count < 2^32.
size_t encode_top(void* message, const float* src, size_t count, size_t k, const Feedback& feedback = {});

// `factor` times the sum of the messages, in the order given; 0 where none has an element. Returns the number of the
// first message that no encode_top made, messages.size() if there is none; dst is not defined then.
size_t sum_top(float* dst, std::span<const void* const> messages, size_t count, size_t k, double factor = 1);

}  // namespace dcoll::kernels
