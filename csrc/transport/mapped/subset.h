// Mapped memory once more, for some of the ranks that share it: a region of its own (messages, board, doorbell, failure
// notice) for each of them, inside its arena, which all have mapped already. So a subset costs no file descriptor and
// no mapping, and what lies in the arenas is as readable for the subset as for the whole.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/endpoint.h"

namespace dcoll {

// This rank's part of a subset that is being made: each member makes one, tells the others where it lies, and connects
// once it knows where theirs lie.
class SubsetRegion {
 public:
  // whole: of this rank. members: local ranks of `whole`, ascending, this one among them.
  SubsetRegion(std::shared_ptr<Window> whole, std::vector<int> members, const MappedOptions& options);
  ~SubsetRegion();

  uint64_t offset() const;  // in this rank's arena
  // offsets: of the members. job_ranks: what messages call them. At most once.
  Endpoint connect(const std::vector<uint64_t>& offsets, std::vector<int> job_ranks);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace dcoll
