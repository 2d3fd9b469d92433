// A communicator's operations that meet by name: what Python calls `comm.by_name`.
#pragma once

#include <memory>

#include "engine/communicator/communicator.h"

namespace dcoll::bind {

struct ByName {
  std::shared_ptr<Communicator> comm;
};

}  // namespace dcoll::bind
