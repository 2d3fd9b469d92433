#include "engine/collective/rider.h"

#include <cstring>

#include "kernels/reduce.h"
#include "plan/agreement.h"

namespace dcoll {

Rider::Rider(const Call& r, Path path, int size, size_t message_bytes) : size_(size) {
  if (r.kind == Kind::kAllGather &&
      plan::rides_on_agreement(sizeof rows_, static_cast<uint32_t>(size), message_bytes)) {
    rows_ = static_cast<int64_t>(r.count);
    operand_ = std::as_bytes(std::span(&rows_, 1));
  }
  if (path != Path::kRide) return;
  const size_t bytes = r.bytes();
  const void* from = r.in;
  if (r.prescale != 1.0) {
    scaled_.resize(bytes);
    kernels::scale(scaled_.data(), r.in, r.count, r.dtype, r.prescale);
    from = scaled_.data();
  }
  operand_ = {static_cast<const std::byte*>(from), bytes};
}

void Rider::arrive(const Dissemination& everybody, Operation& operation) const {
  if (operand_.empty()) return;
  const Request& r = operation.request;
  if (r.kind == Kind::kAllGather) {
    operation.counts.resize(static_cast<size_t>(size_));
    for (int rank = 0; rank < size_; ++rank) {
      std::memcpy(&operation.counts[static_cast<size_t>(rank)], everybody.operand(rank), sizeof rows_);
    }
    return;
  }
  // Everybody adds everybody's operands in rank order: the algorithm "direct".
  std::vector<const void*> operands;
  for (int rank = 0; rank < size_; ++rank) operands.push_back(everybody.operand(rank));
  kernels::reduce_n(r.out, operands, r.count, r.dtype, r.op, final_scale(r.op, r.postscale, size_));
}

}  // namespace dcoll
