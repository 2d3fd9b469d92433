// A communicator of some of a communicator's ranks: their own board and messages, the same memory. Made together: every
// member makes a Subset, all exchange their offsets (a collective of the whole), and then each connects.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/communicator/communicator.h"
#include "transport/bootstrap.h"
#include "transport/mapped/subset.h"

namespace dcoll {

//
// What it was made of is used for the next subset once the communicator is gone. So it must not go before all members
// have closed theirs, which a collective of the whole after close() makes sure of.
class Subset {
 public:
  // ranks: of `whole`, ascending, this one among them.
  Subset(std::shared_ptr<Communicator> whole, std::vector<int> ranks);

  // What the other members have to know.
  uint64_t offset() const { return region_ != nullptr ? region_->offset() : kUnmappedOffset; }
  // Collective over the members; once. offsets: theirs, in the order of the ranks. job: of the whole; null where there
  // is none, which members that cannot all map each other need.
  std::shared_ptr<Communicator> connect(const std::vector<uint64_t>& offsets, Bootstrap* job);

 private:
  Members describe() const;

  const std::shared_ptr<Communicator> whole_;
  const std::vector<int> ranks_;
  std::vector<int> local_;  // of the members: indices in ranks_ of those on this node
  std::unique_ptr<SubsetRegion> region_;
};

}  // namespace dcoll
