// What float32 is on its way between nodes: encoded forms, made and summed on the CPU.
//
//   kFloat16, kBFloat16  half the bytes, rounded to nearest even. float16 saturates: a finite value beyond 65504
//                        becomes the greatest there is. Infinity and NaN stay what they are.
//   kInt8                blocks of 256 elements, each a float32 scale and the multiples of it, -127 to 127: about a
//                        quarter of the bytes. The scale is the block's greatest magnitude / 127, so an element is off
//                        by half a scale at most. A block with infinity or NaN in it arrives as NaN; one without a
//                        magnitude of 1e-36 as zeros.
//
// Stochastic rounding (M. Croci et al., "Stochastic rounding: implementation, error analysis and applications", 2022):
// of the two neighbours of a value the nearer one is the likelier, so that the mean of many roundings is the value. The
// random bits are a hash of a key and of the element's number, so results can be had again. Of bfloat16, and of normal
// float16, the chance is exact; of subnormal ones and of int8's steps to within 2^-16.
//
//   kTopK                the elements of greatest magnitude alone (topk.h).
//   kFloat32             what it is: the same sums without an encoding.
//
// An encoded form does not depend on the instruction set. Encoded blocks of kCodecBlock elements lie end to end, so a
// part that begins at a multiple of it begins at encoded_bytes(codec, begin).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace dcoll::kernels {

enum class Codec : uint8_t { kNone, kFloat16, kBFloat16, kInt8, kTopK, kFloat32 };
inline constexpr size_t kCodecBlock = 256;

inline constexpr size_t kNumCodecs = 6;

// How selections of kTopK travel: everybody's to everybody, or to owners who add them up and select again
// (topk_owners.h), where that is predicted to be much faster.
enum class Exchange : uint8_t { kPredicted, kGather, kOwners };

// A codec and what it needs to know: of kTopK the share of the elements that are sent, greater than 0, at most 1.
struct Encoding {
  Codec codec = Codec::kNone;
  float ratio = 0;
  bool if_it_pays = false;                   // where messages are faster as they are, they go so
  bool stochastic = false;                   // of kFloat16, kBFloat16 and kInt8: rounded at random
  Exchange exchange = Exchange::kPredicted;  // of kTopK
  bool operator==(const Encoding&) const = default;
  explicit operator bool() const { return codec != Codec::kNone; }
};
std::string_view codec_name(Codec codec);
// "", "fp16", "bf16 stochastic", "int8", "topk 0.01", "topk 0.01 owners", "fp32", "auto int8".
std::string encoding_name(const Encoding& encoding);
// Throws ArgumentError, which lists the names, for others.
Encoding encoding_named(std::string_view name);

// Error feedback (F. Seide et al., "1-bit stochastic gradient descent", 2014): `error`, unless null, is added to what
// is encoded, and is what was lost afterwards; what it was where that is no number, as of infinity and of a block of
// int8 with one in it. Of kTopK, `velocity`, unless null, accumulates what comes in, times
// `momentum` at each step, and takes its place (momentum correction; Y. Lin et al., "Deep Gradient Compression", 2018,
// section 3.1); it needs `error`. As long as what is encoded, all of them.
struct Feedback {
  float* error = nullptr;
  float* velocity = nullptr;
  float momentum = 0;
  bool empty = false;      // `error` is all zeros
  bool scattered = false;  // some of `velocity` is of what other ranks encode

  Feedback from(size_t element) const {
    Feedback rest = *this;
    if (error != nullptr) rest.error += element;
    if (velocity != nullptr) rest.velocity += element;
    return rest;
  }
};

// What stochastic rounding draws from, a hash: keys that differ in few bits draw alike. None: rounded to nearest.
using Key = std::optional<uint64_t>;
Key derived(const Key& key, uint64_t number);  // another for each number

// Of so many elements; not for kNone and kTopK, as in what follows. No alignment is assumed of encoded forms.
size_t encoded_bytes(Codec codec, size_t count);

// How much of float32's bytes is left, of long operands; of kTopK too.
double encoded_share(const Encoding& encoding);

// Returns how many values float16 had no room for. `error` as in Feedback.
size_t encode(Codec codec, void* dst, const float* src, size_t count, float* error = nullptr, const Key& key = {});
void decode(Codec codec, float* dst, const void* src, size_t count);

// encode(dst, scale * (srcs[0] + srcs[1] + ...)), added up in float32 in the order given. `error`, unless null: what
// encoding left of the sum, before the scale, is added to it. dst may equal srcs[0].
size_t sum_encoded(Codec codec, void* dst, std::span<const void* const> srcs, size_t count, double scale,
                   float* error = nullptr, const Key& key = {});

}  // namespace dcoll::kernels
