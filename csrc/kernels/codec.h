// What float32 is on its way between nodes: encoded forms, made and summed on the CPU.
//
//   kFloat16, kBFloat16  half the bytes, rounded to nearest even. float16 saturates: a finite value beyond 65504
//   becomes
//                        the greatest there is. Infinity and NaN stay what they are.
//   kInt8                blocks of 256 elements, each a float32 scale and the multiples of it, -127 to 127: about a
//                        quarter of the bytes. The scale is the block's greatest magnitude / 127, so an element is off
//                        by half a scale at most. A block with infinity or NaN in it arrives as NaN; one without a
//                        magnitude of 1e-36 as zeros.
//
// An encoded form does not depend on the instruction set. Encoded blocks of kCodecBlock elements lie end to end, so a
// part that begins at a multiple of it begins at encoded_bytes(codec, begin).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace dcoll::kernels {

enum class Codec : uint8_t { kNone, kFloat16, kBFloat16, kInt8 };
inline constexpr size_t kCodecBlock = 256;

std::string_view codec_name(Codec codec);  // "", "fp16", "bf16", "int8"
// Throws ArgumentError, which lists the names, for others.
Codec codec_named(std::string_view name);

// Of so many elements; not for kNone, as in what follows. No alignment is assumed of encoded forms.
size_t encoded_bytes(Codec codec, size_t count);

// Returns how many values float16 had no room for. `error`, unless null: src[i] - (what decode makes of it); it may
// equal src.
size_t encode(Codec codec, void* dst, const float* src, size_t count, float* error = nullptr);
void decode(Codec codec, float* dst, const void* src, size_t count);

// encode(dst, scale * (srcs[0] + srcs[1] + ...)), added up in float32 in the order given. `error`, unless null: what
// encoding left of the sum, before the scale, is added to it. dst may equal srcs[0].
size_t sum_encoded(Codec codec, void* dst, std::span<const void* const> srcs, size_t count, double scale,
                   float* error = nullptr);

}  // namespace dcoll::kernels
