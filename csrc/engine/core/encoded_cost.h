// What encoded all-reduces cost a rank and save it, by what they are called: for stats().
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
