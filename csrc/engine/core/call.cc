#include "engine/core/call.h"

#include <bit>
#include <numeric>

#include "base/error.h"
#include "base/hash.h"
#include "engine/core/point.h"

namespace dcoll {

std::string_view kind_name(Kind kind) {
  static constexpr auto kNames =
      std::to_array<std::string_view>({"allreduce", "reducescatter", "allgather", "broadcast", "alltoall", "send",
                                       "recv", "barrier", "shutdown", "join"});
  static_assert(static_cast<size_t>(Kind::kJoin) + 1 == kNames.size());
  return name_in(kNames, kind);
}

namespace {

constexpr uint64_t kRefusal = 0x9e3779b97f4a7c15;  // the fingerprint of all refusals, whatever their reasons

template <typename Held>
void validate_adasum(const Arguments<Held>& r, int size) {
  if (r.kind != Kind::kAllReduce || !is_floating(r.dtype) || !(r.algo.as_configured() || r.algo.is_auto())) {
    throw ArgumentError(r.describe() +
                        ": adasum is defined for allreduce of float16, bfloat16, float32 and float64, and has an "
                        "algorithm of its own. Use sum or average, convert first, or leave the algorithm out.");
  }
  if (!std::has_single_bit(static_cast<unsigned>(size))) {
    throw ArgumentError(r.describe() +
                        ": adasum combines ranks in pairs of pairs, so their number must be a power of " +
                        "two (1, 2, 4, 8, ...), but there are " + std::to_string(size) +
                        ". Start another number of ranks, or use average.");
  }
  const size_t total = std::reduce(r.splits.begin(), r.splits.end());
  if (!r.splits.empty() && total != r.count) {
    throw ArgumentError(r.describe() + ": the tensors have " + std::to_string(total) + " elements in all, but " +
                        std::to_string(r.count) + " were given.");
  }
}

template <typename Held>
void validate_scale(const Arguments<Held>& r) {
  if (r.dtype == DType::kBool && r.op == ReduceOp::kAverage) {
    throw ArgumentError(r.describe() +
                        ": the average of bool is not defined. Use sum (or), product (and), min or max, "
                        "or convert to a number type first.");
  }
  if (is_bitwise(r.op) && (is_floating(r.dtype) || r.prescale != 1.0 || r.postscale != 1.0)) {
    throw ArgumentError(r.describe() +
                        ": bitwise operators combine the bits of integers or bool, without prescale and postscale "
                        "factors. Use another operator, or view the tensor as integers first.");
  }
  if (!can_scale(r.dtype, r.prescale) || !can_scale(r.dtype, r.postscale)) {
    throw ArgumentError(r.describe() +
                        ": prescale and postscale factors need a number type, and of integers finite factors. Leave "
                        "them at 1.0 or convert first.");
  }
}

template <typename Held>
std::string factors_text(const Arguments<Held>& r) {
  return (r.prescale != 1.0 ? ", prescale " + std::to_string(r.prescale) : "") +
         (r.postscale != 1.0 ? ", postscale " + std::to_string(r.postscale) : "");
}

// The one list of the fields, for both ways.
template <typename To, typename From>
Arguments<To> copy_of(const Arguments<From>& r) {
  return {.kind = r.kind,
          .in = r.in,
          .out = r.out,
          .count = r.count,
          .row_elems = r.row_elems,
          .dtype = r.dtype,
          .op = r.op,
          .root = r.root,
          .prescale = r.prescale,
          .postscale = r.postscale,
          .algo = r.algo,
          .encoding = r.encoding,
          .in_full = r.in_full,
          .feedback = r.feedback,
          .name = typename To::Text(r.name),
          .splits = {r.splits.begin(), r.splits.end()},
          .stands_for = r.stands_for,
          .refusal = typename To::Text(r.refusal),
          .out_bytes = r.out_bytes,
          .skip_own = r.skip_own,
          .group = typename To::Text(r.group),
          .root_in_job = r.root_in_job,
          .whole = r.whole,
          .packed = r.packed,
          .tensors = r.tensors,
          .into_tensors = r.into_tensors,
          .dims = {r.dims.begin(), r.dims.end()},
          .device = r.device,
          .stream = r.stream,
          .tag = r.tag};
}

}  // namespace

template <typename Held>
Request Arguments<Held>::of(const Call& call, int size) {
  Request r = copy_of<Copies>(call);
  if (call.kind == Kind::kAllToAll && call.splits.empty()) {
    const auto ranks = static_cast<size_t>(size);
    r.splits.assign(ranks, call.count / ranks);
  }
  return r;
}

template <typename Held>
Call Arguments<Held>::call() const {
  return copy_of<Views>(*this);
}

template <typename Held>
std::vector<size_t> Arguments<Held>::shares(int size) const {
  if (!splits.empty()) return {splits.begin(), splits.end()};
  const auto ranks = static_cast<size_t>(size);
  std::vector<size_t> elements(ranks, count / ranks * row_elems);
  for (size_t rank = 0; rank < count % ranks; ++rank) elements[rank] += row_elems;
  return elements;
}

template <typename Held>
void Arguments<Held>::validate(int size) const {
  if (is_point(kind)) return check_peer(kind, root, size);
  if (root < 0 || root >= size) {
    throw ArgumentError(describe() + ": root rank " + std::to_string(root) + " does not exist; allowed are 0 to " +
                        std::to_string(size - 1) + ".");
  }
  if (reduces(kind)) validate_scale(*this);
  if (reduces(kind) && op == ReduceOp::kAdasum) validate_adasum(*this, size);
  if (kind == Kind::kAllToAll) {
    const size_t total = std::reduce(splits.begin(), splits.end());
    if (splits.size() != static_cast<size_t>(size) || total != count) {
      throw ArgumentError(describe() + ": got " + std::to_string(splits.size()) + " splits adding up to " +
                          std::to_string(total) + " rows; allowed are one split per rank (" + std::to_string(size) +
                          ") adding up to the tensor's first dimension (" + std::to_string(count) + ").");
    }
  }
}

template <typename Held>
bool Arguments<Held>::looks_valid(int size) const {
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
template <typename Held>
uint64_t Arguments<Held>::reduction_fingerprint() const {
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

template <typename Held>
uint64_t Arguments<Held>::fingerprint() const {
  if (stands_for != 0) return stands_for;
  if (!refusal.empty()) return kRefusal;
  if (kind == Kind::kAllReduce) return reduction_fingerprint();
  Fingerprint print;  // of a barrier, one word
  print.add(
      static_cast<uint64_t>(kind) | device_bit() | static_cast<uint64_t>(dtype) << 8 | uint64_t{name.size()} << 16,
      row_elems);
  if (!name.empty()) print.add(name);
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

template <typename Held>
std::string Arguments<Held>::describe() const {
  if (!refusal.empty()) return std::string(kCouldNot).append(refusal);
  std::string text(kind_name(kind));
  if (!name.empty()) text.append(" '").append(name).append("'");
  const std::string type(dtype_name(dtype));
  const std::string shaped = compared(dims) ? dims_text(dims) + " " + type : "";
  if (!group.empty() && kind != Kind::kAllReduce) {
    text.append(" (" + (reduces(kind) ? std::string(op_name(op)) + " of " : "")).append(group);
    return text + factors_text(*this) + ")";
  }
  switch (kind) {
    case Kind::kAllReduce:
      text += " (" + std::string(op_name(op)) + " of " +
              (shaped.empty() ? std::to_string(whole_count()) + " " + type : shaped);
      break;
    case Kind::kReduceScatter:
      text += " (" + std::string(op_name(op)) + " of " + std::to_string(count) + " rows of " +
              (shaped.empty() ? std::to_string(row_elems) + " " + type : shaped);
      break;
    case Kind::kBroadcast:
      text += " (" + (shaped.empty() ? std::to_string(whole_count()) + " bytes of " + type : shaped) + " from rank " +
              std::to_string(root_in_job >= 0 ? root_in_job : root);
      break;
    case Kind::kAllGather:
    case Kind::kAllToAll:
      text += " (rows of " + (shaped.empty() ? std::to_string(row_elems) + " bytes of " + type : shaped);
      break;
    case Kind::kSend:
    case Kind::kReceive:
      return describe_point(kind, count, root >= 0 && root_in_job >= 0 ? root_in_job : root, tag);
    case Kind::kBarrier:
    case Kind::kShutdown:
    case Kind::kJoin:
      return text;
  }
  if (!group.empty()) text.append(", ").append(group);
  if (device != device::kHost) text += std::string(", on ") + device::kind_name(device);
  if (encoding) text += ", as " + kernels::encoding_name(encoding);
  if (!algo.as_configured()) text += ", algo " + std::string(algo.name());
  return text + factors_text(*this) + ")";
}

template struct Arguments<Views>;
template struct Arguments<Copies>;

}  // namespace dcoll
