// The kernels on the GPU: the contracts of reduce.h, cast.h, pack.h, codec.h and topk.h, with the same bits (NaN
// payloads aside), plus a stream.
//
// Work is enqueued on `stream` (a cudaStream_t; null is the default stream) of the current device and the call returns.
// All pointers must be readable or writable from that device: its own memory, or a peer's that is mapped. Encoded forms
// and messages of top-k are aligned to 4 bytes here.
#pragma once

#include <cstddef>
#include <span>

#include "base/types.h"
#include "kernels/codec.h"
#include "kernels/pack.h"
#include "kernels/topk.h"

namespace dcoll::kernels::cuda {

// Pointers travel as kernel parameters, of which there are 4 KiB.
inline constexpr size_t kMaxPointers = 128;

void reduce2(void* dst, const void* a, const void* b, size_t count, DType dtype, ReduceOp op, double scale,
             void* stream);
// At most kMaxPointers sources, and as many destinations; ArgumentError above that.
void reduce_n(void* dst, std::span<const void* const> srcs, size_t count, DType dtype, ReduceOp op, double scale,
              void* stream);
void reduce_n_to_n(std::span<void* const> dsts, std::span<const void* const> srcs, size_t count, DType dtype,
                   ReduceOp op, double scale, void* stream);
void scale(void* dst, const void* src, size_t count, DType dtype, double scale, void* stream);

// Loads the kernels of the above into the current device. False: it does not run them, for the build has no code for it
// or its driver is too old. Else the driver loads a kernel when it is first launched; for that it may wait for all that
// the device is doing (CUDA_MODULE_LOADING=LAZY, CUDA's default), and keeps other threads waiting meanwhile.
bool load_reductions();

void cast(void* dst, DType dst_type, const void* src, DType src_type, size_t count, void* stream);
bool load_casts();  // as load_reductions()

// The segments are read before the call returns.
void pack(void* flat, std::span<const Segment> segments, void* stream);
void unpack(std::span<const Segment> segments, const void* flat, void* stream);

// How many values float16 had no room for is added to *beyond, which lies in the device's memory, unless it is null.
void encode(Codec codec, void* dst, const float* src, size_t count, float* error, unsigned long long* beyond,
            const Key& key, void* stream);
void decode(Codec codec, float* dst, const void* src, size_t count, void* stream);
// Two NaNs of different bits that are added leave either.
void sum_encoded(Codec codec, void* dst, std::span<const void* const> srcs, size_t count, double scale, float* error,
                 unsigned long long* beyond, const Key& key, void* stream);

// Of scratch memory for encode_top(), aligned to 16 bytes, as below: 8 bytes for each of k and a sixteenth of the
// elements, and 1 % or so of the operand.
size_t encode_top_scratch(size_t count, size_t k);
// How many elements are sent is written to *sent, in the device's memory, unless that is null.
void encode_top(void* message, const float* src, size_t count, size_t k, const Feedback& feedback, void* scratch,
                unsigned* sent, void* stream);

size_t sum_top_scratch(size_t count, size_t messages);
// *first_bad, in the device's memory, becomes the number of the first message that no encode_top made, if that is less
// than what it is; dst is not defined then.
void sum_top(float* dst, std::span<const void* const> messages, size_t count, size_t k, double factor, void* scratch,
             unsigned* first_bad, void* stream);

}  // namespace dcoll::kernels::cuda
