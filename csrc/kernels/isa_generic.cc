// The kernels for any CPU: SSE2 on x86-64, the baseline vectors of the compiler's target elsewhere.
// Compile flags (kernels.cmake): -O3 -ffp-contract=off -fno-unswitch-loops
#include "kernels/simd_kernels.h"

namespace dcoll::kernels {

namespace {
constexpr Kernels kTable = make_table("generic");
}
const Kernels& generic_kernels() { return kTable; }

}  // namespace dcoll::kernels
