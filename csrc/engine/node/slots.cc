#include "engine/node/slots.h"

#include <algorithm>

namespace dcoll {

namespace {

// The slot form needs one barrier less than Staged, but moves (p-1)n bytes into each rank instead of 2(p-1)n/p, over
// lines that come back from their readers slowly. Where ranks have cores of their own that is more than the barrier
// from 2 KiB on (docs/notebook/one-node.md); where they share cores, a barrier is a few context switches.
size_t one_shot_bytes_for(bool shared_cores) { return shared_cores ? Slots::kBytes : size_t{1} << 10; }

// A piece costs one barrier, the more expensive the more ranks meet (and share a core), so pieces grow with the ranks.
// For eight, 1 MiB was slower than 512 KiB: the slots of all ranks crowd the operands out of the shared cache.
size_t least_piece_bytes_for(int ranks) {
  constexpr size_t kPerRankSquared = size_t{32} << 10;
  return std::min(Slots::kMostPieceBytes, kPerRankSquared * ranks * ranks);
}

}  // namespace

Slots::Slots(std::shared_ptr<Window> window, Board& board, bool shared_cores)
    : board_(board),
      one_shot_bytes_(one_shot_bytes_for(shared_cores)),
      least_piece_bytes_(least_piece_bytes_for(board.size())),
      memory_(Memory::mapped(window, 2 * kBytes + kPieces * kMostPieceBytes)),
      own_offset_(window->offset_of(memory_->data(), memory_->bytes())),
      slots_(board.size()) {
  slots_[window->local_rank()] = memory_->data();
}

void Slots::learn(uint64_t ticket) {
  for (int rank = 0; rank < board_.size(); ++rank) {
    slots_[rank] = board_.place(rank, board_.at(rank, ticket).value, memory_->bytes());
  }
}

// Few ranks take larger pieces where there are enough of them to overlap: lines that have left the writer's own cache
// reach the reader sooner (docs/notebook/one-node.md).
size_t Slots::piece_bytes(size_t bytes) const {
  constexpr size_t kEnough = 4;
  return std::clamp(bytes / kEnough, least_piece_bytes_, kMostPieceBytes);
}

}  // namespace dcoll
