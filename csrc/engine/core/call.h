// The arguments of a collective, without anything that needs allocating: what every call starts from.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/types.h"
#include "device/device.h"
#include "engine/core/algo.h"
#include "engine/core/dims.h"
#include "kernels/codec.h"
#include "kernels/pack.h"

namespace dcoll {

using kernels::Codec;
using kernels::Encoding;
using kernels::Feedback;

// Collectives; then messages between two ranks (engine/p2p); the last three are meetings, which move nothing.
enum class Kind : uint8_t {
  kAllReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kSend,
  kReceive,
  kBarrier,
  kShutdown,
  kJoin
};
std::string_view kind_name(Kind kind);

inline bool is_point(Kind kind) { return kind == Kind::kSend || kind == Kind::kReceive; }

// Whether results are computed. The others only move bytes.
inline bool reduces(Kind kind) { return kind == Kind::kAllReduce || kind == Kind::kReduceScatter; }

// The factor of a reduction's results: an average is a sum that is divided.
inline double final_scale(ReduceOp op, double postscale, int size) {
  return op == ReduceOp::kAverage ? postscale / size : postscale;
}

// Whether the elements can be multiplied by it.
inline bool can_scale(DType dtype, double factor) {
  return factor == 1.0 || is_floating(dtype) || (dtype != DType::kBool && std::isfinite(factor));
}

// Views only: what they refer to, and the memory, belong to the caller and must live until the operation is done.
struct Call {
  Kind kind = Kind::kAllReduce;
  const void* in = nullptr;
  void* out = nullptr;   // allreduce, broadcast (the buffer), reducescatter; allgather, alltoall: see out_bytes
  size_t count = 0;      // allreduce: elements. Others: rows
  size_t row_elems = 1;  // reducescatter: elements per row. Kinds that only move bytes: bytes per row
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  double prescale = 1.0;
  double postscale = 1.0;
  Algo algo{};
  // allreduce: what float32 is between nodes. encodes() (choose_path.h) says whether it is used.
  Encoding encoding{};
  // As long as the operand: what this rank's encoding lost before, and loses now. Used where this rank encodes, which
  // is in the same places in every call of the same length.
  Feedback feedback{};
  std::string_view name{};  // part of what ranks compare; "" is fine
  // alltoall: rows for each rank. reducescatter: elements for each rank; {} is rows shared evenly. Adasum: elements of
  // each tensor; {} is one tensor
  std::span<const size_t> splits{};
  size_t out_bytes = 0;      // allgather, alltoall: a result of just this size goes to `out`; else the core allocates
  bool skip_own = false;     // allgather: nobody looks for this rank's own block in the result, so it may be left out
  std::string_view group{};  // of several tensors as one: what they are, compared as the name is
  // allreduce: an operand packed into mapped memory; of the same call it is so on every rank, and so part of what ranks
  // compare.
  bool packed = false;
  std::span<const kernels::Segment> tensors{};  // as in ReduceJob; {}, or what own_slice() was asked about
  bool into_tensors = false;                    // as in ReduceJob
  Dims dims{};                 // of the operand (allreduce, broadcast) or of one of its rows (the others)
  int device = device::kHost;  // where the memory is. Whether it is on a device is part of what ranks compare

  // Bytes per row, whatever row_elems counts.
  size_t row_bytes() const { return reduces(kind) ? row_elems * dtype_bytes(dtype) : row_elems; }
  // Of this rank's operand; kinds from kBarrier on have none.
  size_t bytes() const { return kind < Kind::kBarrier ? count * row_bytes() : 0; }
  // So little that moving it takes no longer than telling another thread.
  bool is_small() const { return bytes() <= kSmallBytes; }
  static constexpr size_t kSmallBytes = size_t{64} << 10;

  // Whether Request::validate certainly has nothing against it.
  bool plainly_valid(int size) const {
    const bool sums = op == ReduceOp::kSum || (op == ReduceOp::kAverage && dtype != DType::kBool);
    return (kind == Kind::kAllReduce && sums && prescale == 1.0 && postscale == 1.0) || looks_valid(size);
  }
  // What must be the same on every rank.
  uint64_t fingerprint() const;

 private:
  bool looks_valid(int size) const;
  uint64_t reduction_fingerprint() const;
  uint64_t device_bit() const { return uint64_t{device != device::kHost} << 7; }
};

}  // namespace dcoll
