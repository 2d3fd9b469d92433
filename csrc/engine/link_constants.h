// When the constants of the cost model are measured: at the first choice between algorithms for several nodes, once per
// communicator, unless an earlier job of the same kind has left them in the cache.
#pragma once

#include <string>

#include "base/log.h"
#include "base/settings.h"
#include "engine/calibration_cache.h"
#include "engine/task.h"
#include "transport/mpi.h"

namespace dcoll {

struct Fabric;

struct LinkConstants {
  enum class Use { kCacheOrMeasure, kAlwaysMeasure, kBuiltIn };
  Use use = Use::kBuiltIn;
  CalibrationCache cache;
  Log log;
  std::string source = "built in";  // "measured in 61 ms", "/home/u/.cache/dcoll/constants-1f.txt"
};

// What a world of several nodes uses.
LinkConstants link_constants(MpiBackend& mpi, const std::vector<int>& node_of_rank, const Settings& settings, Log log);

// All ranks together. Afterwards the topology of the fabric has the same constants on every rank.
Task learn_constants(Fabric& fabric);

}  // namespace dcoll
