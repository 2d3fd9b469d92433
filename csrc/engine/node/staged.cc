#include "engine/node/staged.h"

#include <algorithm>

#include "kernels/reduce.h"

namespace dcoll {
namespace {

// Elements of a cache line of the slots.
size_t line_of(const ReduceJob& job) { return Memory::kAlignment / dtype_bytes(job.dtype); }

}  // namespace

// At least one, which is empty where there are no elements.
EqualPieces Staged::cut(const ReduceJob& job, const Slots& slots) {
  EqualPieces pieces(job.count, slots.piece_bytes(job.bytes()) / dtype_bytes(job.dtype), line_of(job));
  pieces.count = std::max<size_t>(1, pieces.count);
  return pieces;
}

void Staged::fill(Board& board, Slots& slots, const ReduceJob& job, const EqualPieces& pieces, size_t piece) {
  const size_t elem = dtype_bytes(job.dtype);
  const int self = board.window().local_rank();
  const Span whole = pieces.piece(piece);
  const std::byte* from = job.in + whole.begin * elem;
  std::byte* slot = slots.piece(self, piece);
  if (job.prescale != 1.0) {
    kernels::scale(slot, from, whole.size(), job.dtype, job.prescale);  // own slice too: it is needed scaled
    return;
  }
  const auto copy = [&](size_t begin, size_t end) {
    copy_bytes(slot + begin * elem, from + begin * elem, (end - begin) * elem);
  };
  const Span own = part_on_lines(whole.size(), line_of(job), self, board.size());
  copy(0, own.begin);
  copy(own.end, whole.size());
}

void Staged::fill_first(Board& board, Slots& slots, const ReduceJob& job) {
  fill(board, slots, job, cut(job, slots), 0);
}

Staged::Staged(Board& board, Slots& slots, const ReduceJob& job)
    : board_(board),
      slots_(slots),
      job_(job),
      ins_(board.size()),
      outs_(board.size()),
      sources_(board.size()),
      results_(board.size()) {}

void Staged::begin(uint64_t ticket) {
  pieces_ = cut(job_, slots_);
  step_ = 0;
  ticket_ = ticket;
  for (int rank = 0; rank < board_.size(); ++rank) {
    const BoardEntry::Post post = board_.at(rank, ticket);
    const bool mapped = post.mapped();
    ins_[rank] = mapped ? board_.place(rank, post.offset_in, job_.bytes()) : nullptr;
    outs_[rank] = mapped ? board_.place(rank, post.offset_out, job_.bytes()) : nullptr;
  }
  if (pieces_.count > 1 && ins_[board_.window().local_rank()] == nullptr) fill(board_, slots_, job_, pieces_, 1);
}

void Staged::reduce(size_t piece) {
  const size_t elem = dtype_bytes(job_.dtype);
  const int self = board_.window().local_rank();
  const Span whole = pieces_.piece(piece), own = part_on_lines(whole.size(), line_of(job_), self, board_.size());
  const size_t at = (whole.begin + own.begin) * elem;
  for (int rank = 0; rank < board_.size(); ++rank) {
    std::byte* slot = slots_.piece(rank, piece) + own.begin * elem;
    const bool mapped = ins_[rank] != nullptr;
    sources_[rank] = mapped ? ins_[rank] + at : slot;
    results_[rank] = mapped ? outs_[rank] + at : slot;
  }
  if (job_.prescale == 1.0) sources_[self] = job_.in + at;
  results_[self] = job_.out + at;
  kernels::reduce_n_to_n(results_, sources_, own.size(), job_.dtype, job_.op, job_.postscale);
}

void Staged::collect(size_t piece) {
  const size_t elem = dtype_bytes(job_.dtype);
  const int self = board_.window().local_rank(), ranks = board_.size();
  const std::byte* slot = slots_.piece(self, piece);
  const Span whole = pieces_.piece(piece);
  std::byte* to = job_.out + whole.begin * elem;
  // Beginning behind the own slice, so that not all ranks are after the slice of the same one.
  for (int i = 1; i < ranks; ++i) {
    const Span theirs = part_on_lines(whole.size(), line_of(job_), (self + i) % ranks, ranks);
    copy_bytes(to + theirs.begin * elem, slot + theirs.begin * elem, theirs.size() * elem);
  }
}

bool Staged::poll(bool& moved) {
  const bool in_slots = ins_[board_.window().local_rank()] == nullptr;
  const size_t piece_bytes = pieces_.length * dtype_bytes(job_.dtype);
  for (size_t moved_bytes = 0; step_ <= pieces_.count; moved_bytes += piece_bytes) {
    if (moved_bytes >= kBytesPerPoll || !board_.complete(ticket_)) return false;
    if (step_ < pieces_.count) {
      reduce(step_);
      ticket_ = board_.post({});
    }
    if (in_slots && step_ > 0) collect(step_ - 1);
    ++step_;
    // Into the slot of piece step_ - 2, which was just collected.
    if (in_slots && step_ + 1 < pieces_.count) fill(board_, slots_, job_, pieces_, step_ + 1);
    moved = true;
  }
  return true;
}

void Staged::waiting_for(std::vector<int>& ranks) const { BoardWait(board_, ticket_).waiting_for(ranks); }

}  // namespace dcoll
