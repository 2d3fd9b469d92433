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

TwoShot::TwoShot(Board& board, uint64_t ticket, const ReduceJob& job) : board_(board), job_(job) {
  const int size = board.size(), rank = board.window().local_rank();
  for (int r = 0; r < size; ++r) {
    ins_.push_back(board.window().base(r) + board.at(r, ticket).offset_in);
    outs_.push_back(board.window().base(r) + board.at(r, ticket).offset_out);
  }
  // Slices begin on cache lines, so that no two ranks write to one line.
  const size_t line = Memory::kAlignment / dtype_bytes(job.dtype);
  const size_t lines = (job.count + line - 1) / line;
  at_ = std::min(job.count, lines * rank / size * line);
  end_ = std::min(job.count, lines * (rank + 1) / size * line);
}

bool TwoShot::poll(bool& moved) {
  const size_t elem = dtype_bytes(job_.dtype);
  if (at_ < end_) {
    const size_t count = std::min(end_ - at_, kPieceBytes / elem);
    std::vector<const void*> sources(ins_.size());
    std::vector<void*> results(outs_.size());
    for (size_t r = 0; r < ins_.size(); ++r) {
      sources[r] = ins_[r] + at_ * elem;
      results[r] = outs_[r] + at_ * elem;
    }
    kernels::reduce_n_to_n(results, sources, count, job_.dtype, job_.op, job_.postscale);
    at_ += count;
    moved = true;
    if (at_ < end_) return false;
  }
  if (!posted_) {
    done_ticket_ = board_.post({});
    posted_ = true;
  }
  bool seen = false;  // seeing again what was seen before is no movement
  return BoardWait(board_, done_ticket_).poll(seen);
}

void TwoShot::waiting_for(std::vector<int>& ranks) const {
  if (posted_) BoardWait(board_, done_ticket_).waiting_for(ranks);
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
