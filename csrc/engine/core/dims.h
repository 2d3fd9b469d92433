// The dimensions of an operand, as far as ranks compare them: a transposed or reshaped tensor on one rank has as many
// elements, and would be combined with what belongs elsewhere. One dimension says no more than the number of elements,
// and none no more than that it is one; so only two and more are compared, and only they cost anything.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "base/hash.h"

namespace dcoll {

using Dims = std::span<const int64_t>;

inline bool compared(Dims dims) { return dims.size() >= 2; }

// The caller sees to it that the words which follow cannot be taken for these.
inline void add_dims(Fingerprint& print, Dims dims) {
  for (const int64_t dim : dims) print.add(static_cast<uint64_t>(dim));
}

// "2x3"
inline std::string dims_text(Dims dims) {
  std::string text;
  for (const int64_t dim : dims) {
    if (!text.empty()) text += 'x';
    text += std::to_string(dim);
  }
  return text;
}

}  // namespace dcoll
