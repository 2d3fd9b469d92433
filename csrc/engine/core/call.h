// The arguments of a call, once as views, which need no allocating, and once as what an operation keeps of them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/types.h"
#include "device/device.h"
#include "engine/core/algo.h"
#include "engine/core/dims.h"
#include "kernels/codec.h"
#include "kernels/pack.h"
#include "plan/algorithms.h"

namespace dcoll {

using kernels::Codec;
using kernels::Encoding;
using kernels::Feedback;

// Collectives, in the order of plan::Collective; then messages between two ranks (engine/p2p); the last three are
// meetings, which move nothing.
enum class Kind : uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kAllToAll,
  kSend,
  kReceive,
  kBarrier,
  kShutdown,
  kJoin
};
std::string_view kind_name(Kind kind);

// Of one of the collectives.
inline plan::Collective collective_of(Kind kind) { return static_cast<plan::Collective>(kind); }
static_assert(static_cast<int>(Kind::kReduceScatter) == static_cast<int>(plan::Collective::kReduceScatter));
static_assert(static_cast<int>(Kind::kAllGather) == static_cast<int>(plan::Collective::kAllGather));
static_assert(static_cast<int>(Kind::kBroadcast) == static_cast<int>(plan::Collective::kBroadcast));
static_assert(static_cast<int>(Kind::kAllToAll) == static_cast<int>(plan::Collective::kAllToAll));

inline bool is_meeting(Kind kind) { return kind >= Kind::kBarrier; }
inline bool is_point(Kind kind) { return kind == Kind::kSend || kind == Kind::kReceive; }

// Whether results are computed. The others only move bytes.
inline bool reduces(Kind kind) { return kind == Kind::kAllReduce || kind == Kind::kReduceScatter; }

// Whether ranks may bring as much as they like, so that only the collective tells how long results are.
inline bool is_ragged(Kind kind) { return kind == Kind::kAllGather || kind == Kind::kAllToAll; }

// The factor of a reduction's results: an average is a sum that is divided.
inline double final_scale(ReduceOp op, double postscale, int size) {
  return op == ReduceOp::kAverage ? postscale / size : postscale;
}

// Whether the elements can be multiplied by it.
inline bool can_scale(DType dtype, double factor) {
  return factor == 1.0 || is_floating(dtype) || (dtype != DType::kBool && std::isfinite(factor));
}

// What the texts and lists of a call are: views of what its caller has, or copies.
struct Views {
  using Text = std::string_view;
  using Sizes = std::span<const size_t>;
  using Shape = Dims;
};
struct Copies {
  using Text = std::string;
  using Sizes = std::vector<size_t>;
  using Shape = std::vector<int64_t>;
};

template <typename Held>
struct Arguments {
  Kind kind = Kind::kAllReduce;
  const void* in = nullptr;
  void* out = nullptr;   // allreduce, broadcast (the buffer), reducescatter; allgather, alltoall: see out_bytes
  size_t count = 0;      // allreduce: elements. send, recv: bytes. Others: rows
  size_t row_elems = 1;  // reducescatter: elements per row. Kinds that only move bytes: bytes per row
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;  // send, recv: the peer or kAnySource
  double prescale = 1.0;
  double postscale = 1.0;
  Algo algo{};
  // allreduce: what float32 is between nodes. encodes() (choose_path.h) says whether it is used.
  Encoding encoding{};
  bool in_full = false;  // allreduce: `encoding` is not used after all, because ranks have joined
  // Of a call in place, as long as the operand: what this rank's encoding lost before, and loses now. Used where this
  // rank encodes, which is in the same places in every call of the same length. What a call that is not encoded finds
  // there goes with it.
  Feedback feedback{};
  typename Held::Text name{};  // part of what ranks compare; "" is fine
  // alltoall: rows for each rank. reducescatter: elements for each rank; {} is rows shared evenly. Adasum: elements of
  // each tensor; {} is one tensor
  typename Held::Sizes splits{};
  uint64_t stands_for = 0;        // a joined rank's part in what others called: their fingerprint
  typename Held::Text refusal{};  // barrier: this rank cannot make its next call, because of this; the others' fails
  size_t out_bytes = 0;   // allgather, alltoall: a result of just this size goes to `out`; else the core allocates
  bool skip_own = false;  // allgather: nobody looks for this rank's own block in the result, so it may be left out
  typename Held::Text group{};  // of several tensors as one: what they are, compared as the name is
  int root_in_job = -1;         // what messages call the root; -1: by its number here
  size_t whole = 0;             // of a slice (slices.h): the `count` of its call, by which that is told of
  // allreduce: an operand packed into mapped memory; of the same call it is so on every rank, and so part of what ranks
  // compare.
  bool packed = false;
  std::span<const kernels::Segment> tensors{};  // as in ReduceJob; {}, or what own_slice() was asked about
  bool into_tensors = false;                    // as in ReduceJob
  typename Held::Shape dims{};      // of the operand (allreduce, broadcast) or of one of its rows (the others)
  int device = device::kHost;       // where the memory is. Whether it is on a device is part of what ranks compare
  device::Stream stream = nullptr;  // of the device: after what is on it the memory may be read
  uint64_t tag = 0;                 // send, recv: a point_key() (point.h)

  // With copies of the texts and lists; of an all-to-all without splits: rows shared evenly between the `size` ranks.
  static Arguments<Copies> of(const Arguments<Views>& call, int size);
  Arguments<Views> call() const;  // refers to this

  // Bytes per row, whatever row_elems counts.
  size_t row_bytes() const { return reduces(kind) ? row_elems * dtype_bytes(dtype) : row_elems; }
  // Of this rank's operand; meetings have none.
  size_t bytes() const { return is_meeting(kind) ? 0 : count * row_bytes(); }
  size_t whole_count() const { return whole != 0 ? whole : count; }
  // reducescatter: elements of each rank's share of the result.
  std::vector<size_t> shares(int size) const;
  // So little that moving it takes no longer than telling another thread.
  bool is_small() const { return bytes() <= kSmallBytes; }
  static constexpr size_t kSmallBytes = size_t{64} << 10;

  // Throws ArgumentError for what can never work, before anything is sent.
  void validate(int size) const;
  // Whether it certainly has nothing against this.
  bool plainly_valid(int size) const {
    const bool sums = op == ReduceOp::kSum || (op == ReduceOp::kAverage && dtype != DType::kBool);
    return (kind == Kind::kAllReduce && sums && prescale == 1.0 && postscale == 1.0) || looks_valid(size);
  }
  // What must be the same on every rank.
  uint64_t fingerprint() const;
  // "allreduce 'grad.3' (sum of 1024 float32)", for messages.
  std::string describe() const;

 private:
  bool looks_valid(int size) const;
  uint64_t reduction_fingerprint() const;
  uint64_t device_bit() const { return uint64_t{device != device::kHost} << 7; }
};
extern template struct Arguments<Views>;
extern template struct Arguments<Copies>;

// What its views refer to, and the memory, belong to the caller and must live until the operation is done.
using Call = Arguments<Views>;
// What is queued. Of its memory the same is true.
using Request = Arguments<Copies>;

// What describe() says of a call with a refusal begins with this.
inline constexpr std::string_view kCouldNot = "could not make its call: ";

// The bytes of as many rows as a peer tells of; nullopt: more than any process can address. Sums of it do not overflow.
inline std::optional<size_t> bytes_of_told(uint64_t rows, size_t row_bytes) {
  constexpr size_t kMost = size_t{1} << 47;
  size_t bytes = 0;
  if (rows > kMost || __builtin_mul_overflow(rows, row_bytes, &bytes) || bytes > kMost) return std::nullopt;
  return bytes;
}

}  // namespace dcoll
