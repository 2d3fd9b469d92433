// What encoding takes on this machine, for the cost model (plan/encoded.h).
#pragma once

#include <utility>
#include <vector>

#include "kernels/codec.h"
#include "plan/encoded.h"

namespace dcoll {

// Of the core this thread is on, in a few milliseconds; other ranks may do the same.
plan::Coding measure_coding(const kernels::Encoding& encoding);

// What was measured so far. A measurement is good for every encoding that takes about as long: the codec's, and of a
// selection up to twice as large. So a share that changes with every step is not measured at every step.
class Codings {
 public:
  const plan::Coding* find(const kernels::Encoding& encoding) const;  // null: not measured yet
  void add(const kernels::Encoding& encoding, const plan::Coding& coding) { measured_.emplace_back(encoding, coding); }

 private:
  std::vector<std::pair<kernels::Encoding, plan::Coding>> measured_;
};

}  // namespace dcoll
