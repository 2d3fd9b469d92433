#include "base/types.h"

namespace dcoll {
namespace {

constexpr auto kDTypes =
    std::to_array<std::string_view>({"float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64",
                                     "bool", "int16", "uint16", "uint32", "uint64"});
constexpr auto kReduceOps = std::to_array<std::string_view>(
    {"average", "sum", "adasum", "min", "max", "product", "bitwise and", "bitwise or", "bitwise xor"});
static_assert(kDTypes.size() == kNumDTypes && kReduceOps.size() == kNumReduceOps);

}  // namespace

std::string_view dtype_name(DType dtype) { return name_in(kDTypes, dtype); }
std::string_view op_name(ReduceOp op) { return name_in(kReduceOps, op); }

}  // namespace dcoll
