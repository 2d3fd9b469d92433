// The CPU kernels of reduce.h: checks the arguments and calls the variant in force. The loops are in simd_kernels.h.
#include <cstring>
#include <string>

#include "base/error.h"
#include "kernels/dispatch.h"
#include "kernels/float_state.h"
#include "kernels/reduce.h"
#include "kernels/scale.h"

namespace dcoll::kernels {
Reduction::Reduction(DType dtype, ReduceOp op, double scale)
    : scale_(prepare_scale(dtype, scale)), element_bytes_(dtype_bytes(dtype)), loop_count_(1) {
  check_operator(dtype, op, scale);
  if (is_bitwise(op)) {  // of bits it does not matter whose they are, and there are loops for bytes alone
    loop_count_ = element_bytes_;
    dtype = DType::kUInt8;
  }
  loop_ = active_kernels().reduce[static_cast<int>(dtype)][static_cast<int>(op)];
}

void Reduction::run(std::span<void* const> dsts, std::span<const void* const> srcs, size_t count) const {
  if (srcs.empty() || dsts.empty()) {
    throw ArgumentError("reduce needs at least one source and one destination (got " + std::to_string(srcs.size()) +
                        " and " + std::to_string(dsts.size()) + ")");
  }
  if (count == 0) return;
  if (srcs.size() == 1 && !scale_.active) {  // nothing to combine: a copy, which keeps every bit, of NaNs too
    for (void* dst : dsts) {
      if (dst != srcs[0]) std::memcpy(dst, srcs[0], count * element_bytes_);
    }
    return;
  }
  const KeepSubnormals keep;
  // The loops address bytes. char may alias anything, and the pointer arrays themselves are only read.
  loop_(reinterpret_cast<char* const*>(dsts.data()), dsts.size(), reinterpret_cast<const char* const*>(srcs.data()),
        srcs.size(), count * loop_count_, scale_);
}

void reduce2(void* dst, const void* a, const void* b, size_t count, DType dtype, ReduceOp op, double scale) {
  const void* const srcs[] = {a, b};
  Reduction(dtype, op, scale).run({&dst, 1}, srcs, count);
}

void reduce_n(void* dst, std::span<const void* const> srcs, size_t count, DType dtype, ReduceOp op, double scale) {
  Reduction(dtype, op, scale).run({&dst, 1}, srcs, count);
}

void reduce_n_to_n(std::span<void* const> dsts, std::span<const void* const> srcs, size_t count, DType dtype,
                   ReduceOp op, double scale) {
  Reduction(dtype, op, scale).run(dsts, srcs, count);
}

void scale(void* dst, const void* src, size_t count, DType dtype, double scale) {
  Reduction(dtype, ReduceOp::kSum, scale).run({&dst, 1}, {&src, 1}, count);
}

}  // namespace dcoll::kernels
