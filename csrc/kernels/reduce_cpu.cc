// The CPU kernels of reduce.h: checks the arguments and calls the variant in force. The loops are in simd_kernels.h.
#include <cstring>
#include <string>

#include "base/error.h"
#include "kernels/dispatch.h"
#include "kernels/float_state.h"
#include "kernels/reduce.h"
#include "kernels/scale.h"

namespace dcoll::kernels {
namespace {

void run(std::span<void* const> dsts, std::span<const void* const> srcs, size_t count, DType dtype, ReduceOp op,
         double scale_factor) {
  if (srcs.empty() || dsts.empty()) {
    throw ArgumentError("reduce needs at least one source and one destination (got " + std::to_string(srcs.size()) +
                        " and " + std::to_string(dsts.size()) + ")");
  }
  check_operator(dtype, op, scale_factor);
  const Scale scale = prepare_scale(dtype, scale_factor);
  if (count == 0) return;
  if (srcs.size() == 1 && !scale.active) {  // nothing to combine: a copy, which keeps every bit, of NaNs too
    for (void* dst : dsts) {
      if (dst != srcs[0]) std::memcpy(dst, srcs[0], count * dtype_bytes(dtype));
    }
    return;
  }
  if (is_bitwise(op)) {  // of bits it does not matter whose they are, and there are loops for bytes alone
    count *= dtype_bytes(dtype);
    dtype = DType::kUInt8;
  }
  const KeepSubnormals keep;
  const ReduceFn reduce = active_kernels().reduce[static_cast<int>(dtype)][static_cast<int>(op)];
  // The loops address bytes. char may alias anything, and the pointer arrays themselves are only read.
  reduce(reinterpret_cast<char* const*>(dsts.data()), dsts.size(), reinterpret_cast<const char* const*>(srcs.data()),
         srcs.size(), count, scale);
}

}  // namespace

void reduce2(void* dst, const void* a, const void* b, size_t count, DType dtype, ReduceOp op, double scale) {
  const void* const srcs[] = {a, b};
  run({&dst, 1}, srcs, count, dtype, op, scale);
}

void reduce_n(void* dst, std::span<const void* const> srcs, size_t count, DType dtype, ReduceOp op, double scale) {
  run({&dst, 1}, srcs, count, dtype, op, scale);
}

void reduce_n_to_n(std::span<void* const> dsts, std::span<const void* const> srcs, size_t count, DType dtype,
                   ReduceOp op, double scale) {
  run(dsts, srcs, count, dtype, op, scale);
}

void scale(void* dst, const void* src, size_t count, DType dtype, double scale) {
  run({&dst, 1}, {&src, 1}, count, dtype, ReduceOp::kSum, scale);
}

}  // namespace dcoll::kernels
