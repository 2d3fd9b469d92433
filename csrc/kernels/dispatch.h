// Internal to kernels: the table of functions each instruction set provides, and which one is in force.
//
// How the variants are built: simd.h, simd_codec.h and simd_kernels.h are compiled four times, by isa_generic.cc,
// isa_avx2.cc, isa_avx512.cc and isa_avx512vnni.cc, each with its own -m flags (kernels.cmake). Everything in those
// headers lives in an unnamed namespace and calls no inline function of another header: an inline function with
// external linkage, compiled with AVX flags, could be the copy the linker keeps for everybody, and then crash on a CPU
// without AVX.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace dcoll::kernels {

// `scale` of the public contract, already checked and prepared for the dtype.
struct Scale {
  bool active;      // false: leave the value untouched
  double factor;    // multiply by this when divisor is 1; integers in float64
  int64_t divisor;  // >= 1: divide by this when it is not 1
};

// Reduces n_srcs (>= 1) sources into n_dsts (>= 1) destinations.
using ReduceFn = void (*)(char* const* dsts, size_t n_dsts, const char* const* srcs, size_t n_srcs, size_t count,
                          const Scale& scale);
using CastFn = void (*)(char* dst, const char* src, size_t count);
using CountFn = size_t (*)(const char* src, size_t count);
using DrawFn = void (*)(char* dst, const char* src, size_t count, uint64_t key, size_t first);
using FindFn = size_t (*)(uint32_t* found, const char* src, size_t count, uint32_t least, uint32_t first);

inline constexpr int kNumFloatTypes = 4;  // the DTypes up to kFloat64

struct LowRank;
inline constexpr size_t kLowRankStep = 16;  // elements of a row that are worked on at once

struct Kernels {
  const char* isa;
  // Null: Adasum, which is no operation on elements, and bitwise operators but for kUInt8.
  ReduceFn reduce[kNumDTypes][kNumReduceOps];
  CastFn cast[kNumFloatTypes][kNumFloatTypes];  // [source][destination]; null on the diagonal, which is a copy
  CountFn count_beyond_half;                    // float32 that is finite, and not in float16
  CastFn clamp_to_half;                         // these become the greatest there is
  CastFn quantize;                              // float32 to codec.h's int8, and back
  CastFn dequantize;
  // The same at random, with the numbers of elements from `first` on, a multiple of a block; of float16 what it has
  // room for.
  DrawFn draw_half;
  DrawFn draw_bfloat16;
  DrawFn draw_steps;
  FindFn find_beyond;  // topk.h
  // low_rank.h
  void (*low_rank_project)(float* p, float* matrix, const float* source, const float* error, const float* q,
                           const LowRank& shape);
  void (*low_rank_project_back)(float* q, const float* matrix, const float* p, const LowRank& shape);
  void (*low_rank_split)(float* matrix, float* error, const float* p, const float* q, const float* sum,
                         const LowRank& shape);
  // Over whole steps: count is a multiple of kLowRankStep.
  double (*low_rank_dot)(const double* a, const double* b, size_t count);
  void (*low_rank_subtract)(double* from, double factor, const double* x, size_t count);  // from -= factor * x
};

const Kernels& generic_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512vnni_kernels();
#endif

// The variant in force; defined in dispatch.cc beside active_isa() and set_isa().
const Kernels& active_kernels();

}  // namespace dcoll::kernels
