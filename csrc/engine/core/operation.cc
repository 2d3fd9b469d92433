#include "engine/core/operation.h"

#include <bit>
#include <numeric>

#include "base/error.h"
#include "engine/core/point.h"

namespace dcoll {

namespace {

constexpr uint64_t kRefusal = 0x9e3779b97f4a7c15;  // the fingerprint of all refusals, whatever their reasons

void validate_adasum(const Request& r, int size) {
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

void validate_scale(const Request& r) {
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

std::string factors_text(const Request& r) {
  return (r.prescale != 1.0 ? ", prescale " + std::to_string(r.prescale) : "") +
         (r.postscale != 1.0 ? ", postscale " + std::to_string(r.postscale) : "");
}

}  // namespace

Request Request::of(const Call& call, int size) {
  Request r{.kind = call.kind,
            .in = call.in,
            .out = call.out,
            .count = call.count,
            .row_elems = call.row_elems,
            .dtype = call.dtype,
            .op = call.op,
            .root = call.root,
            .prescale = call.prescale,
            .postscale = call.postscale,
            .algo = call.algo,
            .encoding = call.encoding,
            .feedback = call.feedback,
            .name = std::string(call.name),
            .splits = {call.splits.begin(), call.splits.end()},
            .out_bytes = call.out_bytes,
            .skip_own = call.skip_own,
            .group = std::string(call.group),
            .packed = call.packed,
            .tensors = call.tensors,
            .into_tensors = call.into_tensors,
            .dims = {call.dims.begin(), call.dims.end()},
            .device = call.device};
  if (call.kind == Kind::kAllToAll && call.splits.empty()) {
    const auto ranks = static_cast<size_t>(size);
    r.splits.assign(ranks, call.count / ranks);
  }
  return r;
}

Call Request::call() const {
  return {.kind = kind,
          .in = in,
          .out = out,
          .count = count,
          .row_elems = row_elems,
          .dtype = dtype,
          .op = op,
          .root = root,
          .prescale = prescale,
          .postscale = postscale,
          .algo = algo,
          .encoding = encoding,
          .feedback = feedback,
          .name = name,
          .splits = splits,
          .out_bytes = out_bytes,
          .skip_own = skip_own,
          .group = group,
          .packed = packed,
          .tensors = tensors,
          .into_tensors = into_tensors,
          .dims = dims,
          .device = device};
}

void Request::validate(int size) const {
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

uint64_t Request::fingerprint() const {
  if (stands_for != 0) return stands_for;
  return refusal.empty() ? call().fingerprint() : kRefusal;
}

std::string Request::describe() const {
  if (!refusal.empty()) return std::string(kCouldNot) + refusal;
  std::string text(kind_name(kind));
  if (!name.empty()) text += " '" + name + "'";
  const std::string type(dtype_name(dtype));
  const std::string shaped = compared(dims) ? dims_text(dims) + " " + type : "";
  if (!group.empty() && kind != Kind::kAllReduce) {
    text += " (" + (reduces(kind) ? std::string(op_name(op)) + " of " : "") + group;
    return text + factors_text(*this) + ")";
  }
  switch (kind) {
    case Kind::kAllReduce:
      text += " (" + std::string(op_name(op)) + " of " + (shaped.empty() ? std::to_string(count) + " " + type : shaped);
      break;
    case Kind::kReduceScatter:
      text += " (" + std::string(op_name(op)) + " of " + std::to_string(count) + " rows of " +
              (shaped.empty() ? std::to_string(row_elems) + " " + type : shaped);
      break;
    case Kind::kBroadcast:
      text += " (" + (shaped.empty() ? std::to_string(count) + " bytes of " + type : shaped) + " from rank " +
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
  if (!group.empty()) text += ", " + group;
  if (device != device::kHost) text += std::string(", on ") + device::kind_name(device);
  if (encoding) text += ", as " + kernels::encoding_name(encoding);
  if (!algo.as_configured()) text += ", algo " + std::string(algo.name());
  return text + factors_text(*this) + ")";
}

std::byte* Operation::place_output(size_t bytes) {
  if (request.out != nullptr && bytes == request.out_bytes) return static_cast<std::byte*>(request.out);
  output = Memory::uninitialized(bytes);
  return output->data();
}

}  // namespace dcoll
