// What encoding takes on this machine, for the cost model (plan/encoded.h).
#pragma once

#include "kernels/codec.h"
#include "plan/encoded.h"

namespace dcoll {

// Of the core this thread is on, in a few milliseconds; other ranks may do the same.
plan::Coding measure_coding(const kernels::Encoding& encoding);

}  // namespace dcoll
