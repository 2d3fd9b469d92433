#include "engine/core/call.h"

#include <bit>

#include "base/hash.h"

namespace dcoll {

std::string_view kind_name(Kind kind) {
  static constexpr auto kNames =
      std::to_array<std::string_view>({"allreduce", "broadcast", "allgather", "reducescatter", "alltoall", "send",
                                       "recv", "barrier", "shutdown", "join"});
  static_assert(static_cast<size_t>(Kind::kJoin) + 1 == kNames.size());
  return name_in(kNames, kind);
}

bool Call::looks_valid(int size) const {
  const auto reduction_is = [this] {
    return op != ReduceOp::kAdasum && !is_bitwise(op) && can_scale(dtype, prescale) && can_scale(dtype, postscale) &&
           (dtype != DType::kBool || op != ReduceOp::kAverage);
  };
  switch (kind) {
    case Kind::kAllReduce:
      return reduction_is();
    case Kind::kBroadcast:
      return root >= 0 && root < size;
    case Kind::kReduceScatter:
      return splits.empty() && reduction_is();
    case Kind::kAllToAll:
      return splits.empty() && count % static_cast<size_t>(size) == 0;
    case Kind::kAllGather:
    case Kind::kBarrier:
      return true;
    case Kind::kShutdown:
    case Kind::kJoin:
    case Kind::kSend:
    case Kind::kReceive:
      break;
  }
  return false;
}

// Made for every small all-reduce, so it is short in the usual case: what has its default value leaves no word, and the
// lengths in the first word tell apart what follows.
uint64_t Call::reduction_fingerprint() const {
  Fingerprint print;
  print.add(static_cast<uint64_t>(Kind::kAllReduce) | device_bit() | static_cast<uint64_t>(dtype) << 8 |
                static_cast<uint64_t>(op) << 16 | static_cast<uint64_t>(encoding.codec) << 20 |
                uint64_t{algo.id()} << 24 | uint64_t{name.size()} << 32 |
                uint64_t{compared(dims) ? dims.size() & 0x7f : 0} << 56 | uint64_t{packed} << 63,
            count);
  if (compared(dims)) add_dims(print, dims);
  if (!name.empty()) print.add(name);
  if (prescale != 1.0 || postscale != 1.0) {
    print.add(std::bit_cast<uint64_t>(prescale)).add(std::bit_cast<uint64_t>(postscale));
  }
  if (encoding) {
    print.add(std::bit_cast<uint32_t>(encoding.ratio) | uint64_t{encoding.if_it_pays} << 32 |
              uint64_t{encoding.stochastic} << 33 | static_cast<uint64_t>(encoding.exchange) << 34);
  }
  if (!splits.empty() || !group.empty()) {
    print.add(group);
    for (const size_t elements : splits) print.add(elements);
  }
  return print.value();
}

uint64_t Call::fingerprint() const {
  if (kind == Kind::kAllReduce) return reduction_fingerprint();
  Fingerprint print;
  print.add(static_cast<uint64_t>(kind) | device_bit()).add(static_cast<uint64_t>(dtype)).add(row_elems).add(name);
  if (kind == Kind::kBroadcast) print.add(count).add(static_cast<uint64_t>(root));
  if (kind == Kind::kReduceScatter) {
    print.add(count).add(static_cast<uint64_t>(op));
    print.add(std::bit_cast<uint64_t>(prescale)).add(std::bit_cast<uint64_t>(postscale));
    for (const size_t elements : splits) print.add(elements);
  }
  if (!group.empty()) print.add(group);
  if (compared(dims)) add_dims(print, dims);
  return print.value();
}

}  // namespace dcoll
