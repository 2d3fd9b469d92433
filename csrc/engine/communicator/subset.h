// A communicator of some of a communicator's ranks: their own board and messages, the same memory. Its members make it
// together, and nobody else takes part.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "engine/communicator/communicator.h"
#include "transport/bootstrap.h"
#include "transport/mapped/subset.h"

namespace dcoll {

// Called by each member, in the order in which the others make the groups they share. The lowest of them gathers over
// messages of the whole where the members' regions lie, and tells them all; MismatchError on all of them where they
// name different ranks, and the deadline is that of the whole. What a group was made of is used again for the next ones
// once all members' communicators are gone.
//
// ranks: of `whole`, this one among them; the group counts them as they come. job: of whole's job, which members that
// cannot all map each other need; null where there is none. look_around is called now and then; what it throws breaks
// off, and fails the whole.
std::shared_ptr<Communicator> make_group(std::shared_ptr<Communicator> whole, std::vector<int> ranks, Bootstrap* job,
                                         const std::function<void()>& look_around = {});

// One member's part in that: made, its offset told to the others, and connected once theirs are known.
class Subset {
 public:
  // ranks: of `whole`, this one among them.
  Subset(std::shared_ptr<Communicator> whole, std::vector<int> ranks);

  // What the other members have to know.
  uint64_t offset() const { return region_ != nullptr ? region_->offset() : kUnmappedOffset; }
  // Collective over the members; once. offsets: theirs, in the order of the ranks.
  std::shared_ptr<Communicator> connect(const std::vector<uint64_t>& offsets, Bootstrap* job);

 private:
  Members describe() const;

  const std::shared_ptr<Communicator> whole_;
  const std::vector<int> ranks_;
  std::vector<int> local_;  // of the members: indices in ranks_ of those on this node
  std::unique_ptr<SubsetRegion> region_;
};

}  // namespace dcoll
