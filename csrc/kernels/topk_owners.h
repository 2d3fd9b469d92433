// Top-k among many: selections (topk.h) are cut by who owns which element, and each owner adds up what is its, selects
// again and passes that on (Ok-Topk; S. Li and T. Hoefler, "Near-optimal sparse allreduce for distributed deep
// learning", PPoPP 2022). There the owners' ranges are balanced by boundaries that ranks agree on now and then; here
// blocks of kOwnedBlock elements are dealt out by a hash of their number: the load is even wherever the selected are,
// and nothing has to be agreed on or remembered.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kernels/topk.h"

namespace dcoll::kernels {

inline constexpr size_t kOwnedBlock = 64;
size_t owner_of(size_t element, size_t owners);

// For each owner the message of its elements, one behind the other: top_bytes(count, elements[owner]) each.
struct SplitTop {
  std::vector<size_t> elements;
  std::vector<std::byte> messages;
};
// Of what encode_top made here.
SplitTop split_top(const void* message, size_t count, size_t k, size_t owners);

// The message of the k greatest of the messages' sum, which is formed in the order given; messages[i] is of
// elements[i]. The others of the sum are added to `left`, unless null, of `count` elements, but for infinities and NaN.
// Returns the number of the first message that no split_top made, messages.size() if there is none; what is written is
// not defined then.
size_t merge_top(void* message, std::span<const void* const> messages, std::span<const size_t> elements, size_t count,
                 size_t k, float* left);

}  // namespace dcoll::kernels
