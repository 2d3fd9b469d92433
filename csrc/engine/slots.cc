#include "engine/slots.h"

#include <algorithm>
#include <cstring>

#include "kernels/reduce.h"

namespace dcoll {

namespace {

// The slot form needs one barrier less than Staged, but its lines come back from readers at 15 ns each where cores
// share no L2. For two ranks with a core each that is more than the barrier from 8 KiB on. More ranks usually share
// cores, and then a barrier is a few context switches.
size_t one_shot_bytes_for(int ranks) { return ranks == 2 ? size_t{8} << 10 : Slots::kBytes; }

// A piece costs one barrier, the more expensive the more ranks meet (and share a core), so pieces grow with the ranks:
// 128 KiB for two, where 32 to 512 KiB were measured to be equal, 512 KiB for four, where half of it was equal and a
// quarter slower. For eight, 1 MiB was slower: the slots of all ranks crowd the operands out of the shared cache.
size_t piece_bytes_for(int ranks) {
  constexpr size_t kPerRankSquared = size_t{32} << 10, kMost = size_t{512} << 10;
  return std::min(kMost, kPerRankSquared * ranks * ranks);
}

}  // namespace

Slots::Slots(std::shared_ptr<Window> window, Board& board)
    : board_(board),
      one_shot_bytes_(one_shot_bytes_for(board.size())),
      piece_bytes_(piece_bytes_for(board.size())),
      memory_(Memory::mapped(window, 2 * kBytes + kPieces * piece_bytes_)),
      own_offset_(window->offset_of(memory_->data(), memory_->bytes())),
      slots_(board.size()),
      sources_(board.size()) {
  slots_[window->local_rank()] = memory_->data();
}

void Slots::learn(uint64_t ticket) {
  for (int rank = 0; rank < board_.size(); ++rank) {
    slots_[rank] = board_.window().base(rank) + board_.at(rank, ticket).value;
  }
}

std::byte* Slots::slot(int rank, uint64_t ticket) const { return slots_[rank] + (ticket % 2) * kBytes; }

void Slots::fill(uint64_t ticket, const ReduceJob& job, size_t begin, size_t count) {
  const size_t elem = dtype_bytes(job.dtype);
  std::byte* mine = slot(board_.window().local_rank(), ticket);
  if (job.prescale != 1.0) {
    kernels::scale(mine, job.in + begin * elem, count, job.dtype, job.prescale);
  } else if (count > 0) {
    std::memcpy(mine, job.in + begin * elem, count * elem);
  }
}

void Slots::reduce(uint64_t ticket, const ReduceJob& job, size_t begin, size_t count) {
  for (int rank = 0; rank < board_.size(); ++rank) sources_[rank] = slot(rank, ticket);
  kernels::reduce_n(job.out + begin * dtype_bytes(job.dtype), sources_, count, job.dtype, job.op, job.postscale);
}

}  // namespace dcoll
