// How all-reduces are encoded; and what that costs a rank and saves it, by what they are called: for stats().
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "base/thread_safety.h"
#include "kernels/codec.h"

namespace dcoll {

struct EncodedCost {
  uint64_t calls = 0;
  uint64_t elements = 0;     // that this rank has encoded
  uint64_t plain_bytes = 0;  // that it would have sent of them, as they are, in a ring
  uint64_t wire_bytes = 0;   // that it has sent
  uint64_t saturated = 0;    // values that float16 had no room for
  int64_t encode_ns = 0;
  int64_t decode_ns = 0;  // and adding up
  int64_t total_ns = 0;   // from the agreement to the result

  // All of an operand, among so many ranks; by sending so much.
  void note(size_t count, size_t ranks, size_t bytes_sent) {
    elements += count;
    plain_bytes += 2 * (ranks - 1) * count * sizeof(float) / ranks;
    wire_bytes += bytes_sent;
  }
  void add(const EncodedCost& more) {
    calls += more.calls;
    elements += more.elements;
    plain_bytes += more.plain_bytes;
    wire_bytes += more.wire_bytes;
    saturated += more.saturated;
    encode_ns += more.encode_ns;
    decode_ns += more.decode_ns;
    total_ns += more.total_ns;
  }
};

// How one is encoded.
struct Coded {
  kernels::Encoding encoding{};  // none: it is not
  kernels::Feedback feedback{};  // as in Call
  bool by_owners = false;        // of top-k (schedule/encoded_all_reduce.h)
  kernels::Key key{};            // of stochastic rounding: another on each rank
  EncodedCost* cost = nullptr;   // is added to

  // Of a part that begins with this element.
  Coded from(size_t element) const {
    return {encoding, feedback.from(element), by_owners, kernels::derived(key, element), cost};
  }
};

// One thread adds while others look.
class EncodedCosts {
 public:
  struct Named {
    kernels::Encoding encoding;  // the last
    EncodedCost cost;
  };

  void add(const std::string& name, const kernels::Encoding& encoding, const EncodedCost& cost) {
    const MutexLock lock(mutex_);
    // A script may call each operation otherwise.
    Named& named = by_name_[by_name_.size() < kMostNames || by_name_.contains(name) ? name : "others"];
    named.encoding = encoding;
    named.cost.add(cost);
  }
  // Of this name so far.
  uint64_t calls(const std::string& name) const {
    const MutexLock lock(mutex_);
    const auto found = by_name_.find(by_name_.contains(name) ? name : "others");
    return found == by_name_.end() ? 0 : found->second.cost.calls;
  }
  std::map<std::string, Named> all() const {
    const MutexLock lock(mutex_);
    return by_name_;
  }

 private:
  static constexpr size_t kMostNames = 4096;
  mutable Mutex mutex_;
  std::map<std::string, Named> by_name_ DCOLL_GUARDED_BY(mutex_);
};

}  // namespace dcoll
