#include "engine/collective/join.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "base/log.h"
#include "engine/collective/run_collective.h"
#include "engine/core/slices.h"
#include "kernels/cast.h"

namespace dcoll {
namespace {

// What changes no result of the operator, once it is multiplied by `prescale`.
double neutral(ReduceOp op, double prescale) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (prescale == 0) return 0;  // as everybody's is
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return 0;
    case ReduceOp::kMin:
      return prescale < 0 ? -kInfinity : kInfinity;
    case ReduceOp::kMax:
      return prescale < 0 ? kInfinity : -kInfinity;
    case ReduceOp::kProduct:
      return 1 / prescale;
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
    case ReduceOp::kAdasum:
      break;  // of integers; refused: mismatch.cc
  }
  return 0;
}

// The bits of the same for integers and bool.
uint64_t neutral_bits(const Called& call) {
  const bool is_signed = call.dtype == DType::kInt8 || call.dtype == DType::kInt16 || call.dtype == DType::kInt32 ||
                         call.dtype == DType::kInt64;
  const uint64_t top = uint64_t{1} << (8 * dtype_bytes(call.dtype) - 1);
  uint64_t least = is_signed ? top : 0, greatest = call.dtype == DType::kBool ? 1 : ~least;
  if (call.prescale < 0) std::swap(least, greatest);
  return call.op == ReduceOp::kMin       ? greatest
         : call.op == ReduceOp::kMax     ? least
         : call.op == ReduceOp::kProduct ? 1
         : call.op == ReduceOp::kBitAnd  ? ~uint64_t{0}
                                         : 0;
}

void fill_neutral(std::byte* to, const Called& call) {
  const size_t bytes = dtype_bytes(call.dtype);
  if (call.count == 0) return;
  if (is_floating(call.dtype)) {
    const double value = neutral(call.op, call.prescale);
    kernels::cast(to, call.dtype, &value, DType::kFloat64, 1);
  } else {
    const uint64_t bits = neutral_bits(call);
    std::memcpy(to, &bits, bytes);  // the lowest come first on every machine that this is built for
  }
  for (size_t i = 1; i < call.count; ++i) std::memcpy(to + i * bytes, to, bytes);
}

bool is_zero(ReduceOp op) { return op == ReduceOp::kSum || op == ReduceOp::kAverage; }

}  // namespace

Task nothing_to_do() { co_return; }

bool has_neutral(const Called& call) {
  // Adasum's would be one per tensor, and the ranks that go on would no longer be a power of two.
  if (call.op == ReduceOp::kAdasum) return false;
  return call.op != ReduceOp::kProduct || call.prescale == 1.0 || is_floating(call.dtype);
}

Task contribute_nothing(Fabric& f, Called call) {
  const size_t bytes = call.count * dtype_bytes(call.dtype);
  // Mapped, where the others' memory may be: an all-reduce in place needs everybody's.
  const auto memory = f.board != nullptr ? Memory::mapped(f.window, bytes) : Memory::plain(bytes);
  if (!is_zero(call.op)) fill_neutral(memory->data(), call);
  Operation operation(call.stand_in());
  operation.request.in = operation.request.out = memory->data();
  Slices slices(operation.request, Slices::bytes(f.board != nullptr));
  for (size_t slice = 0; slice < slices.number(); ++slice) {
    slices.enter(slice);
    co_await run_collective(f, operation);
  }
}

Task run_join(Fabric& f, Operation& op) {
  while (f.size > 1) {
    Operation round({.kind = Kind::kJoin, .count = kOneRound});
    co_await run_collective(f, round);
    if (!round.counts.empty()) break;
    if (op.rounds++ + op.named_rounds == 0) f.tell(LogLevel::kInfo, op.note);
  }
  // The last to join is the one that took part in the fewest.
  RecordExchange all_rounds(f, op.rounds + op.named_rounds);
  if (f.size > 1) co_await all_rounds.executor;
  // Of several, the one with the highest number; alone, rank 0, whose record is a zero.
  const auto fewest = std::min_element(all_rounds.all.rbegin(), all_rounds.all.rend());
  op.counts = {all_rounds.all.rend() - fewest - 1};
}

}  // namespace dcoll
