// The kernels for CPUs with AVX2 and F16C (Haswell, Zen and later).
// Compile flags (kernels.cmake): -O3 -ffp-contract=off -fno-unswitch-loops -mavx2 -mf16c
#include "kernels/simd_kernels.h"

namespace dcoll::kernels {

namespace {
constexpr Kernels kTable = make_table("avx2");
}
const Kernels& avx2_kernels() { return kTable; }

}  // namespace dcoll::kernels
