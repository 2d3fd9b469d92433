// A long call on a device's memory, slice by slice: while one is on the wire, the next is copied from the device and
// the one before back to it. To the other ranks it is one call, with one fingerprint; what it says of itself is the
// whole.
#pragma once

#include <algorithm>
#include <cstddef>

#include "engine/core/call.h"

namespace dcoll {

class Slices {
 public:
  // How long, by whether all ranks share memory. There, a copy takes ten times as long as to begin it and to agree, and
  // little is under way at the end. Between nodes a slice is cut once more, into pieces that are under way at once.
  static constexpr size_t bytes(bool all_share) { return size_t{all_share ? 4u : 32u} << 20; }

  // most: bytes(). Of the same call the same on every rank, for what decides is what ranks compare.
  Slices(Request& request, size_t most) : request_(request), in_(request.in), out_(request.out), count_(request.count) {
    if (!can_be_cut(request) || request.bytes() <= most) return;
    elem_ = request.row_bytes();
    each_ = most / elem_;
  }
  Slices(const Slices&) = delete;
  Slices& operator=(const Slices&) = delete;

  size_t number() const { return each_ == 0 ? 1 : (count_ + each_ - 1) / each_; }
  size_t begin_bytes(size_t slice) const { return slice * each_ * elem_; }
  // The request is of that slice alone, and tells of all of its call.
  void enter(size_t slice) {
    if (each_ == 0) return;
    if (slice == 0 && request_.stands_for == 0) request_.stands_for = request_.fingerprint();
    const size_t begin = begin_bytes(slice);
    request_.in = static_cast<const std::byte*>(in_) + begin;
    request_.out = static_cast<std::byte*>(out_) + begin;
    request_.count = std::min(each_, count_ - slice * each_);
    request_.whole = count_;
  }
  // The request is what it was, and still stands for its own call.
  void leave() {
    if (each_ == 0) return;
    request_.in = in_;
    request_.out = out_;
    request_.count = count_;
    request_.whole = 0;
  }

 private:
  // An encoded call is bound by its wire, and its errors are kept for the whole of it.
  static bool can_be_cut(const Request& r) {
    return r.device != device::kHost && !r.encoding && !r.packed && r.splits.empty() &&
           (r.kind == Kind::kBroadcast || (r.kind == Kind::kAllReduce && r.op != ReduceOp::kAdasum));
  }

  Request& request_;
  const void* in_;
  void* out_;
  size_t count_, each_ = 0, elem_ = 1;
};

}  // namespace dcoll
