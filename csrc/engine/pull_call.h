// The arguments of a broadcast, an all-gather, a reduce-scatter, an all-to-all or a barrier, without anything that
// needs allocating: what a synchronous call starts from (for an all-reduce: ReduceCall).
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "engine/operation.h"

namespace dcoll {

struct PullCall {
  Kind kind = Kind::kBarrier;
  const void* in = nullptr;
  void* out = nullptr;
  size_t count = 0;  // this and what follows: as in Request
  size_t row_elems = 1;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  double prescale = 1.0;
  double postscale = 1.0;
  std::string_view name{};
  // alltoall: rows for each rank; reducescatter: elements for each. {}: shared evenly
  std::span<const size_t> splits{};
  size_t out_bytes = 0;  // allgather, alltoall
  std::string_view group{};
  Dims dims{};

  static PullCall of(const Request& request);
  Request request(int size) const;
  // Whether Request::validate certainly has nothing against it.
  bool plainly_valid(int size) const;
  uint64_t fingerprint() const;  // equals Request's
  // Bytes per row, whatever row_elems counts.
  size_t row_bytes() const { return kind == Kind::kReduceScatter ? row_elems * dtype_bytes(dtype) : row_elems; }
};

}  // namespace dcoll
