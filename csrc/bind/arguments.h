// Arguments as Python passes them: codes of dtypes and operators, names of codecs, addresses as integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "base/types.h"
#include "kernels/codec.h"
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

template <typename T = void>
T* to_pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// (address, offset in bytes, bytes); address 0 is an absent tensor.
using SegmentTuple = std::tuple<uintptr_t, size_t, size_t>;

// How Python gives a kernel what it takes as T.
template <typename T>
struct Argument {  // numbers
  using Given = T;
  static T of(T given) { return given; }
};
template <>
struct Argument<DType> {
  using Given = int;
  static DType of(int code) { return to_dtype(code); }
};
template <>
struct Argument<ReduceOp> {
  using Given = int;
  static ReduceOp of(int code) { return to_op(code); }
};
// Of the codecs whose encoded form is as long for any values.
template <>
struct Argument<kernels::Codec> {
  using Given = std::string_view;
  static kernels::Codec of(std::string_view name) {
    const kernels::Codec codec = kernels::encoding_named(name).codec;
    if (codec != kernels::Codec::kNone && codec != kernels::Codec::kTopK) return codec;
    throw ArgumentError("'" + std::string(name) + "' is none of fp16, bf16, int8 and fp32: see encode_top for top-k.");
  }
};
template <typename T>
struct Argument<T*> {
  using Given = uintptr_t;
  static T* of(uintptr_t address) { return to_pointer<T>(address); }
};
template <typename T>
struct Argument<std::span<T* const>> {
  using Given = const std::vector<uintptr_t>&;
  static std::vector<T*> of(Given addresses) {
    std::vector<T*> pointers;
    for (const uintptr_t address : addresses) pointers.push_back(to_pointer<T>(address));
    return pointers;
  }
};
template <>
struct Argument<std::span<const kernels::Segment>> {
  using Given = const std::vector<SegmentTuple>&;
  static std::vector<kernels::Segment> of(Given tuples) {
    std::vector<kernels::Segment> segments;
    for (const auto& [address, offset, bytes] : tuples) segments.push_back({to_pointer(address), offset, bytes});
    return segments;
  }
};

// A kernel as a function of what Python gives.
template <typename Result, typename... Args>
auto by_address(Result (*kernel)(Args...)) {
  return [kernel](typename Argument<std::remove_cvref_t<Args>>::Given... given) -> Result {
    return kernel(Argument<std::remove_cvref_t<Args>>::of(given)...);
  };
}

}  // namespace dcoll::bind
