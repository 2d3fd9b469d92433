// The CPU kernels of cast.h. The loops are in simd_kernels.h.
#include <cstring>
#include <string>

#include "base/error.h"
#include "kernels/cast.h"
#include "kernels/dispatch.h"
#include "kernels/float_state.h"

namespace dcoll::kernels {

void cast(void* dst, DType dst_type, const void* src, DType src_type, size_t count) {
  for (const DType type : {src_type, dst_type}) {
    if (!is_floating(type)) {
      throw ArgumentError("cannot cast " + std::string(dtype_name(type)) +
                          ": cast converts between float16, bfloat16, float32 and float64");
    }
  }
  if (count == 0) return;
  if (src_type == dst_type) {
    if (dst != src) std::memcpy(dst, src, count * dtype_bytes(src_type));
    return;
  }
  const KeepSubnormals keep;
  const CastFn convert = active_kernels().cast[static_cast<int>(src_type)][static_cast<int>(dst_type)];
  convert(static_cast<char*>(dst), static_cast<const char*>(src), count);
}

}  // namespace dcoll::kernels
