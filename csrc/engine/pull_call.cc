#include "engine/pull_call.h"

#include <bit>

#include "base/hash.h"

namespace dcoll {

PullCall PullCall::of(const Request& r) {
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
          .name = r.name,
          .splits = r.splits,
          .out_bytes = r.out_bytes,
          .group = r.group,
          .dims = r.dims};
}

Request PullCall::request(int size) const {
  Request r{.kind = kind,
            .in = in,
            .out = out,
            .count = count,
            .row_elems = row_elems,
            .dtype = dtype,
            .op = op,
            .root = root,
            .prescale = prescale,
            .postscale = postscale,
            .name = std::string(name),
            .splits = {splits.begin(), splits.end()},
            .out_bytes = out_bytes,
            .group = std::string(group),
            .dims = {dims.begin(), dims.end()}};
  if (kind == Kind::kAllToAll && splits.empty()) {
    const size_t ranks = static_cast<size_t>(size);
    r.splits.assign(ranks, count / ranks);
  }
  return r;
}

bool PullCall::plainly_valid(int size) const {
  switch (kind) {
    case Kind::kBroadcast:
      return root >= 0 && root < size;
    case Kind::kReduceScatter:
      return splits.empty() && op != ReduceOp::kAdasum && can_scale(dtype, prescale) && can_scale(dtype, postscale) &&
             (dtype != DType::kBool || op != ReduceOp::kAverage);
    case Kind::kAllToAll:
      return splits.empty() && count % static_cast<size_t>(size) == 0;
    case Kind::kAllGather:
    case Kind::kBarrier:
      return true;
    case Kind::kAllReduce:
    case Kind::kShutdown:
    case Kind::kJoin:
      break;
  }
  return false;
}

uint64_t PullCall::fingerprint() const {
  Fingerprint print;
  print.add(static_cast<uint64_t>(kind)).add(static_cast<uint64_t>(dtype)).add(row_elems).add(name);
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
