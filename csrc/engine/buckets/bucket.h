// Fused gradient buckets. Parameters are laid out one after the other in a few flat buffers; the gradients *are* views
// of them, so nothing is packed or unpacked. A bucket is submitted as soon as all its gradients are there, while
// backward still computes the next ones.
//
// Order: buckets are submitted in index order on every rank (bucket i waits for bucket i-1), so no coordinator is
// needed. Indices follow the order in which gradients become ready: guessed as the reverse of the parameters' order at
// first, then as observed (rebuild).
//
// Unused parameters: behind its parameters a bucket holds one element per parameter, 1 where this rank had a gradient
// and 0 where not. It is reduced with the rest, so after the reduction every rank knows which parameters nobody used,
// at no extra message.
//
// Compressed buckets: the gradients stay what they are, and a second buffer of a 16-bit dtype, the wire, is what is
// reduced. A gradient is cast into the wire when it is ready, instead of being copied, and all of them back when the
// bucket has come in, so they are read and written once each way. Flags are in the wire.
//
// Encoded buckets (kernels/codec.h): what travels between nodes is float32's codec, and the error of int8 and top-k is
// kept. What a rank lost in encoding is its residual, which it adds when it encodes the next backward's gradients, so
// nothing is lost for good. In a node of several ranks each encodes its share of the bucket, so where a bucket is not
// the one it was, the residual is added to the rank's own gradients, once. A bucket that is not encoded, always or this
// time, takes all of its residual with it. A flag would not survive beside large gradients, so the flags of an encoded
// bucket are reduced by an operation of their own, as they are.
//
// Gradients that the program keeps beyond their step stay what they are: move() gives what comes next another memory.
// A gradient that was kept once has memory of its own from then on, and is copied in and out of its bucket, so that
// whoever keeps it again keeps no more than it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/types.h"
#include "engine/buckets/rounds.h"
#include "engine/communicator/communicator.h"
#include "engine/core/memory.h"
#include "engine/core/operation.h"

namespace dcoll {

struct ReducerOptions {
  ReduceOp op = ReduceOp::kAverage;  // sum or average
  size_t bucket_bytes = size_t{25} << 20;
  size_t first_bucket_bytes = size_t{1} << 20;  // small, so that communication starts early
  double prescale = 1.0;
  double postscale = 1.0;
  Encoding encoding{};      // of float32 between nodes
  bool feedback = true;     // what int8 and top-k lose is kept
  double momentum = 0;      // of top-k: momentum correction (kernels::Feedback)
  size_t start_step = 0;    // of top-k: so many backwards go as they are
  size_t warmup_steps = 0;  // of top-k: so many backwards then take a larger share, less each time
  std::optional<DType>
      wire{};  // of other types: what gradients of more than 2 bytes per element are cast to on their way
  std::vector<size_t> groups{};  // of each parameter: a bucket per group (and dtype). {}: by size
  std::string label{};           // in the names of buckets, which ranks compare: another for each Reducer in use
};

struct ParamInfo {
  size_t count = 0;
  DType dtype = DType::kFloat32;
  std::string name;
};

// One bucket: its parameters in one buffer, in the order of the slots.
struct Bucket {
  struct Slot {
    size_t param;
    size_t offset_bytes;
    std::shared_ptr<Memory> own{};  // of the gradient, if it does not lie in the bucket
  };
  DType dtype = DType::kFloat32;
  std::vector<Slot> slots;
  DType wire_dtype = DType::kFloat32;
  size_t flags_offset = 0;  // in elements
  size_t count = 0;         // elements, flags included
  std::shared_ptr<Memory> memory;
  std::shared_ptr<Memory> wire;        // what is reduced: `memory`, unless the bucket is compressed
  std::shared_ptr<Memory> residual{};  // float32 like the gradients, where encoding loses what the next step is to get
  std::shared_ptr<Memory> velocity{};  // as long, of momentum correction
  bool holds = false;                  // not all of the residual need be zero
  bool scattered = false;              // some of the residual is of what other ranks encode now
  bool scattered_velocity = false;     // likewise
  bool encoded = false;
  bool own_flags = false;  // an operation of theirs: they would be lost in this encoding
  std::string name;
  bool moved = false;  // some gradients have memory of their own
  size_t ready = 0;
  std::shared_ptr<Operation> operation;        // since it was submitted
  std::shared_ptr<Operation> flags_operation;  // of a bucket with own_flags

  std::byte* gradient(size_t slot) const {
    const Slot& at = slots[slot];
    return at.own != nullptr ? at.own->data() : memory->data() + at.offset_bytes;
  }
  bool compressed() const { return wire_dtype != dtype; }
  std::byte* on_wire(size_t element) const { return wire->data() + element * dtype_bytes(wire_dtype); }
  std::byte* slot_on_wire(size_t slot) const { return on_wire(slots[slot].offset_bytes / dtype_bytes(dtype)); }
  std::byte* flag(size_t slot) const { return on_wire(flags_offset + slot); }
};

// Not thread-safe: called by one thread at a time (from Python, under the interpreter lock).
class Reducer {
 public:
  Reducer(std::shared_ptr<Communicator> comm, std::vector<ParamInfo> params, const ReducerOptions& options);

  // Where its schedules of compression are.
  Rounds& rounds() { return rounds_; }

  size_t num_buckets() const { return buckets_.size(); }
  const ParamInfo& param(size_t index) const { return params_.at(index); }
  const Bucket& bucket(size_t index) const { return buckets_.at(index); }
  // Where the parameter's gradient lies: a block, and how many bytes behind its beginning.
  std::pair<std::shared_ptr<Memory>, size_t> gradient(size_t param) const;

  // The gradient is in its bucket, or is brought there from `gradient`, where it lies in the parameter's order and
  // dtype. False when it was ready already; then nothing is done.
  bool mark_ready(size_t param, const void* gradient = nullptr);
  // End of backward: parameters that are not ready contribute zeros; submits the rest and waits for all buckets, by
  // `wait`, which throws what an operation failed with. Returns the parameters no rank had a gradient for. Afterwards,
  // also when it throws, no bucket is in flight (unless `wait` threw something that is no Error) and the next backward
  // may begin. A round in which ranks have to agree on rounds() first submits nothing before this.
  std::vector<size_t> finish(const std::function<void(Operation&)>& wait);
  // In place of finish(): this rank cannot go on. Returns how many operations are not submitted, which other ranks wait
  // for: at least one, because the last one is left to finish(), so that a backward that fails behind its last gradient
  // is no success on the others. That costs nothing: the end of backward is near when the last bucket is full.
  size_t abandon();
  // Before a round: Ctrl-C ends a wait, and abandon() does not wait, so peers may still read the buckets of the last
  // one.
  void settle(const std::function<void(Operation&)>& wait) const;
  std::vector<size_t> missing() const;
  // Between backwards: the memory of these gradients is somebody else's from now on. Returns the parameters whose
  // gradients lie elsewhere now, these among them, with nothing in it.
  std::vector<size_t> move(const std::vector<size_t>& params);
  std::vector<size_t> order() const;
  void rebuild(const std::vector<size_t>& order);

  // What encoding this parameter's gradients has lost so far, and its velocity, both in units of gradients; empty where
  // nothing of the kind is kept. keep() takes an error of any float32 gradients, a velocity where there is momentum.
  enum class Kept : uint8_t { kError, kVelocity };
  std::vector<float> kept(size_t param, Kept what) const;
  void keep(size_t param, Kept what, std::span<const float> values);

  Communicator& communicator() const { return *comm_; }
  double wait_seconds() const { return wait_seconds_; }

 private:
  struct Place {
    size_t bucket;
    size_t slot;
  };
  // What is kept of a parameter that has no gradient in this round: if no rank has one, nobody looks at what arrives.
  struct Held {
    size_t bucket, slot;
    std::vector<float> error, velocity;
    bool scattered;
  };
  void fill_buckets(const std::vector<size_t>& order);
  std::vector<Bucket> by_size(const std::vector<size_t>& order) const;
  std::vector<Bucket> by_group(const std::vector<size_t>& order) const;
  void append(Bucket& bucket, size_t param) const;
  std::string name_of(const Bucket& bucket, size_t index) const;
  void close_bucket(Bucket& bucket);
  void allocate(Bucket& bucket) const;
  void note_backward();
  void pack(Bucket& bucket, size_t slot, const void* gradient);
  void submit(Bucket& bucket);
  void clear_gaps(const Bucket& bucket) const;
  void add_scattered(Bucket& bucket) const;
  void give_feedback(Bucket& bucket, Request& request) const;
  void note_kept(Bucket& bucket) const;
  void hold_back(size_t bucket, size_t slot);
  void give_back();
  void keep_residuals(const std::vector<Bucket>& old);
  Encoding encoding_now() const;
  void agree_on_rounds(const std::function<void(Operation&)>& wait);
  void flush();
  void unpack(const Bucket& bucket) const;
  void wait_for_all(const std::function<void(Operation&)>& wait);
  std::vector<size_t> unused_anywhere() const;
  void reset();

  std::shared_ptr<Communicator> comm_;
  std::vector<ParamInfo> params_;
  ReducerOptions options_;
  std::vector<Bucket> buckets_;
  std::vector<Place> place_;      // per parameter
  std::vector<uint8_t> ready_;    // per parameter, in this backward
  std::vector<Held> held_;        // until the round ends
  std::vector<size_t> arrived_;   // parameters in the order they became ready in this backward
  std::vector<size_t> observed_;  // ... in the last finished one
  size_t next_ = 0;               // the next bucket to submit
  double wait_seconds_ = 0;
  size_t backwards_ = 0;  // begun so far
  Rounds rounds_;
};

}  // namespace dcoll
