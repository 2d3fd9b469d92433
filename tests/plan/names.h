// What tests call an algorithm.
#pragma once

#include <string>

#include "plan/algorithms.h"
#include "plan/describe.h"

namespace dcoll::test {

// "allreduce ring".
inline std::string full_name(const plan::Algorithm& algorithm) {
  return std::string(plan::collective_name(algorithm.collective)) + " " + std::string(algorithm.name);
}

}  // namespace dcoll::test
