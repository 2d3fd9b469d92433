#include "engine/node/two_shot.h"

#include <algorithm>
#include <bit>

namespace dcoll {

TwoShot::TwoShot(Board& board, const ReduceJob& job, const kernels::Reduction& reduction)
    : board_(board), job_(job), reduction_(reduction), ins_(board.size()), outs_(board.size()) {}

void TwoShot::begin(uint64_t ticket) {
  const bool scaled = job_.prescale != 1.0;
  const size_t bytes = job_.bytes();
  for (int rank = 0; rank < board_.size(); ++rank) {
    const BoardEntry::Post post = board_.at(rank, ticket);
    outs_[rank] = board_.place(rank, post.offset_out, bytes);
    ins_[rank] = scaled ? outs_[rank] : board_.place(rank, post.offset_in, bytes);
  }
  board_.fetch_next_record();
  if (!scaled) return begin_reducing();
  phase_ = Phase::kScaling;
  at_ = 0;
  end_ = bytes;
}

void TwoShot::begin_reducing() {
  const Span own = slice(job_.bytes(), board_.rank(), board_.size());
  at_ = own.begin;
  end_ = own.end;
  for (size_t r = 0; r < ins_.size(); ++r) {
    ins_[r] = static_cast<const std::byte*>(ins_[r]) + at_;
    outs_[r] = static_cast<std::byte*>(outs_[r]) + at_;
  }
  phase_ = Phase::kReducing;
}

void TwoShot::scale_piece() {
  const size_t bytes = std::min(end_ - at_, kPieceBytes), elem = dtype_bytes(job_.dtype);
  kernels::scale(job_.out + at_, job_.in + at_, bytes / elem, job_.dtype, job_.prescale);
  at_ += bytes;
}

void TwoShot::reduce_piece() {
  const size_t end = std::min(end_, at_ + kPieceBytes);
  if (job_.tensors.empty()) return reduce(end - at_);
  kernels::for_each_part(job_.tensors, at_, end, [&](void* own, size_t bytes) {
    ins_[board_.rank()] = own;
    if (job_.into_tensors) outs_[board_.rank()] = own;
    reduce(bytes);
  });
}

void TwoShot::reduce(size_t bytes) {
  const size_t elem = dtype_bytes(job_.dtype);
  reduction_.run(outs_, ins_, bytes >> std::countr_zero(elem));
  at_ += bytes;
  if (at_ == end_) return;
  for (size_t r = 0; r < ins_.size(); ++r) {
    ins_[r] = static_cast<const std::byte*>(ins_[r]) + bytes;
    outs_[r] = static_cast<std::byte*>(outs_[r]) + bytes;
  }
}

void TwoShot::post_and_wait_in(Phase phase) {
  everybody_.emplace(board_, board_.post({}));
  phase_ = phase;
}

bool TwoShot::poll(bool& moved) {
  if (phase_ == Phase::kScaling) {
    scale_piece();
    moved = true;
    if (at_ < end_) return false;
    post_and_wait_in(Phase::kAllScaled);
  }
  if (phase_ == Phase::kAllScaled) {
    if (!everybody_->poll(moved)) return false;
    begin_reducing();
  }
  if (phase_ == Phase::kReducing) {
    if (at_ < end_) {
      reduce_piece();
      moved = true;
      if (at_ < end_) return false;
    }
    post_and_wait_in(Phase::kAllReduced);
  }
  return everybody_->poll(moved);
}

void TwoShot::waiting_for(std::vector<int>& ranks) const {
  if (phase_ == Phase::kAllScaled || phase_ == Phase::kAllReduced) everybody_->waiting_for(ranks);
}

}  // namespace dcoll
