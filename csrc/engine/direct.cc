#include "engine/direct.h"

#include <algorithm>
#include <cstring>

#include "kernels/reduce.h"

namespace dcoll {

Slots::Slots(std::shared_ptr<Window> window, Board& board)
    : board_(board),
      memory_(Memory::mapped(window, 2 * kBytes)),
      own_offset_(window->offset_of(memory_->data(), 2 * kBytes)),
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

Staged::Staged(Board& board, Slots& slots, const ReduceJob& job, uint64_t filled)
    : board_(board),
      slots_(slots),
      job_(job),
      piece_(std::min(Slots::kBytes / dtype_bytes(job.dtype), job.count)),
      ticket_(filled),
      posted_(filled != 0) {}

bool Staged::poll(bool& moved) {
  while (at_ < job_.count) {
    if (!posted_) {
      piece_ = std::min(Slots::kBytes / dtype_bytes(job_.dtype), job_.count - at_);
      slots_.fill(board_.next_ticket(), job_, at_, piece_);
      ticket_ = board_.post({});
      posted_ = moved = true;
    }
    bool seen = false;
    if (!BoardWait(board_, ticket_).poll(seen)) return false;
    slots_.reduce(ticket_, job_, at_, piece_);
    at_ += piece_;
    posted_ = false;
    moved = true;
  }
  return true;
}

void Staged::waiting_for(std::vector<int>& ranks) const {
  if (posted_) BoardWait(board_, ticket_).waiting_for(ranks);
}

}  // namespace dcoll
