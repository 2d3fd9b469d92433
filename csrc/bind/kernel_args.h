// Arguments of the kernels as Python passes them: dtype and op codes, addresses as integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "base/types.h"
#include "kernels/pack.h"

namespace dcoll::bind {

inline DType to_dtype(int code) {
  if (code >= 0 && code < kNumDTypes) return static_cast<DType>(code);
  throw ArgumentError("unknown dtype code " + std::to_string(code) + ": allowed are 0 to " +
                      std::to_string(kNumDTypes - 1));
}

inline ReduceOp to_op(int code) {
  if (code >= 0 && code < kNumReduceOps) return static_cast<ReduceOp>(code);
  throw ArgumentError("unknown op code " + std::to_string(code) + ": allowed are 0 to " +
                      std::to_string(kNumReduceOps - 1));
}

inline void* to_pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

inline std::vector<void*> to_pointers(const std::vector<uintptr_t>& addresses) {
  std::vector<void*> pointers;
  for (const uintptr_t address : addresses) pointers.push_back(to_pointer(address));
  return pointers;
}
inline std::vector<const void*> to_const_pointers(const std::vector<uintptr_t>& addresses) {
  std::vector<const void*> pointers;
  for (const uintptr_t address : addresses) pointers.push_back(to_pointer(address));
  return pointers;
}

// (address, offset in bytes, bytes); address 0 is an absent tensor.
using SegmentTuple = std::tuple<uintptr_t, size_t, size_t>;
inline std::vector<kernels::Segment> to_segments(const std::vector<SegmentTuple>& tuples) {
  std::vector<kernels::Segment> segments;
  for (const auto& [address, offset, bytes] : tuples) segments.push_back({to_pointer(address), offset, bytes});
  return segments;
}

}  // namespace dcoll::bind
