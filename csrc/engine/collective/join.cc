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

template <typename T>
void fill_integers(std::byte* to, const Called& call, T least, T greatest) {
  if (call.prescale < 0) std::swap(least, greatest);
  const T value = call.op == ReduceOp::kMin       ? greatest
                  : call.op == ReduceOp::kMax     ? least
                  : call.op == ReduceOp::kProduct ? T{1}
                  : call.op == ReduceOp::kBitAnd  ? static_cast<T>(~T{})
                                                  : T{};
  for (size_t i = 0; i < call.count; ++i) std::memcpy(to + i * sizeof value, &value, sizeof value);
}

template <typename T>
void fill_integers(std::byte* to, const Called& call) {
  fill_integers(to, call, std::numeric_limits<T>::min(), std::numeric_limits<T>::max());
}

void fill_neutral(std::byte* to, const Called& call) {
  switch (call.dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kFloat32:
    case DType::kFloat64: {
      const double value = neutral(call.op, call.prescale);
      const size_t bytes = dtype_bytes(call.dtype);
      if (call.count > 0) kernels::cast(to, call.dtype, &value, DType::kFloat64, 1);
      for (size_t i = 1; i < call.count; ++i) std::memcpy(to + i * bytes, to, bytes);
      return;
    }
    case DType::kInt8:
      return fill_integers<int8_t>(to, call);
    case DType::kUInt8:
      return fill_integers<uint8_t>(to, call);
    case DType::kInt32:
      return fill_integers<int32_t>(to, call);
    case DType::kInt64:
      return fill_integers<int64_t>(to, call);
    case DType::kBool:
      return fill_integers<uint8_t>(to, call, 0, 1);
    case DType::kInt16:
      return fill_integers<int16_t>(to, call);
    case DType::kUInt16:
      return fill_integers<uint16_t>(to, call);
    case DType::kUInt32:
      return fill_integers<uint32_t>(to, call);
    case DType::kUInt64:
      return fill_integers<uint64_t>(to, call);
  }
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
