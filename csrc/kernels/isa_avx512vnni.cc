// The kernels for CPUs with AVX-512 F, BW, VL, DQ and VNNI (Cascade Lake, Zen 4 and later).
// Compile flags (kernels.cmake): -O3 -ffp-contract=off -fno-unswitch-loops -mavx512f -mavx512bw -mavx512vl -mavx512dq
// -mf16c -mavx512vnni
#include "kernels/simd_kernels.h"

namespace dcoll::kernels {

namespace {
constexpr Kernels kTable = make_table("avx512vnni");
}
const Kernels& avx512vnni_kernels() { return kTable; }

}  // namespace dcoll::kernels
