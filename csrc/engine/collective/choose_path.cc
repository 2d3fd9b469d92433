#include "engine/collective/choose_path.h"

#include "engine/collective/by_nccl.h"
#include "engine/collective/on_device.h"
#include "plan/agreement.h"

namespace dcoll {

std::string_view path_text(Path path) {
  switch (path) {
    case Path::kMeeting:
      return "the handshake alone";
    case Path::kNodeDirect:
      return "a direct all-reduce in the memory that all ranks share";
    case Path::kPull:
      return "every rank reads what is for it in the memory that all ranks share";
    case Path::kRide:
      return "with the handshake, whose messages have room for the operands";
    case Path::kTwoLevels:
      return "two levels: shared memory inside each node, a schedule of messages between nodes";
    case Path::kAdasum:
      return "Adasum's tree of pairs";
    case Path::kSchedule:
      return "a schedule of messages";
    case Path::kNccl:
      return "by NCCL, if each rank has a GPU of its own and torch brings NCCL";
    case Path::kOpened:
      return "on the devices, if they reach each other";
  }
  return "?";
}

bool has_codec(const Fabric& f, const Call& call) {
  return call.encoding && !call.in_full && call.dtype == DType::kFloat32 && f.size > 1 &&
         (call.op == ReduceOp::kSum || call.op == ReduceOp::kAverage);
}

bool uses_codec(const Fabric& f, const Call& call) {
  if (!has_codec(f, call) || !f.may_encode(call.bytes())) return false;
  return f.compress_local || !call.encoding.if_it_pays || f.pays(call.encoding, call.bytes());
}

bool is_cast(const kernels::Encoding& encoding) {
  using kernels::Codec;
  return (encoding.codec == Codec::kFloat16 || encoding.codec == Codec::kBFloat16) && !encoding.stochastic;
}

bool is_cast_on_device(const Fabric& f, const Call& call) {
  return is_cast(call.encoding) && has_codec(f, call) && call.count > 0 && f.may_encode(call.bytes());
}

Path choose_path(const Fabric& f, const Call& call) {
  if (call.device != device::kHost && goes_by_nccl(f, call)) return Path::kNccl;
  return stays_on_device(f, call) ? Path::kOpened : path_by_host(f, call);
}

Path path_by_host(const Fabric& f, const Call& call) {
  if (is_meeting(call.kind)) return Path::kMeeting;
  // The others have no algorithm of their own to choose: the configured one says whether they may read peers' memory.
  if (call.kind != Kind::kAllReduce) {
    return f.board != nullptr && f.algo.takes_direct() ? Path::kPull : Path::kSchedule;
  }
  if (call.op == ReduceOp::kAdasum) return Path::kAdasum;
  if (encodes(f, call)) return f.hierarchy != nullptr ? Path::kTwoLevels : Path::kSchedule;
  const Algo algo = call.algo.or_else(f.algo);
  if (f.all_reduce != nullptr && algo.takes_direct()) return Path::kNodeDirect;
  if (f.hierarchy != nullptr && algo.takes_levels()) return Path::kTwoLevels;
  const bool dissemination = f.size > 1 && f.board == nullptr && f.hierarchy == nullptr;
  if (dissemination && algo.is_one_to_all() &&
      plan::rides_on_agreement(call.bytes(), static_cast<uint32_t>(f.size), f.slice_bytes)) {
    return Path::kRide;
  }
  return Path::kSchedule;
}

}  // namespace dcoll
