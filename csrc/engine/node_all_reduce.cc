#include "engine/node_all_reduce.h"

#include <algorithm>
#include <cstring>

#include "kernels/reduce.h"

namespace dcoll {
namespace {

bool is_mapped(const BoardEntry::Post& post) {
  return post.offset_in != Window::kUnmapped && post.offset_out != Window::kUnmapped;
}

}  // namespace

void NodeAllReduce::enter(const ReduceJob& job, uint64_t fingerprint) {
  job_ = job;
  phase_ = Phase::kEntered;
  outcome_ = Outcome::kNone;
  const size_t bytes = job.bytes();
  BoardEntry::Post post{fingerprint, Window::kUnmapped, Window::kUnmapped, job.count};
  if (bytes > kInPlaceBytes) {
    post.offset_in = board_.window().offset_of(job.in, bytes);
    post.offset_out = board_.window().offset_of(job.out, bytes);
  }
  if (bytes > Board::kInlineBytes) {
    const size_t first = std::min(job.count, Slots::kBytes / dtype_bytes(job.dtype));
    if (!is_mapped(post)) slots_.fill(board_.next_ticket(), job, 0, first);
  } else if (job.prescale != 1.0) {
    kernels::scale(board_.next_inline_data(), job.in, job.count, job.dtype, job.prescale);
  } else if (bytes > 0) {
    std::memcpy(board_.next_inline_data(), job.in, bytes);
  }
  ticket_ = board_.post(post);
  everybody_.emplace(board_, ticket_);
}

bool NodeAllReduce::poll(bool& moved) {
  if (outcome_ != Outcome::kNone) return true;
  if (phase_ == Phase::kEntered) {
    if (!everybody_->poll(moved)) return false;
    if (agree()) return true;
  }
  if (!two_shot_.poll(moved)) return false;
  outcome_ = Outcome::kDone;
  return true;
}

// Settles the outcome, or begins the two-shot form. True: settled.
bool NodeAllReduce::agree() {
  const uint64_t fingerprint = board_.at(0, ticket_).fingerprint;
  int mapped = 0;
  bool equal = true;
  for (int rank = 0; rank < board_.size(); ++rank) {
    const BoardEntry::Post& post = board_.at(rank, ticket_);
    equal &= post.fingerprint == fingerprint;
    mapped += is_mapped(post);
  }
  none_mapped_ = mapped == 0;
  outcome_ = Outcome::kDone;
  if (!equal) {
    outcome_ = Outcome::kMismatch;
  } else if (job_.bytes() <= Board::kInlineBytes) {
    reduce_inline();
  } else if (none_mapped_ && job_.bytes() <= Slots::kBytes) {
    slots_.reduce(ticket_, job_, 0, job_.count);
  } else if (mapped == board_.size()) {
    outcome_ = Outcome::kNone;
    phase_ = Phase::kTwoShot;
    two_shot_.begin(ticket_, job_);
  } else {
    outcome_ = Outcome::kToStage;
  }
  return outcome_ != Outcome::kNone;
}

void NodeAllReduce::reduce_inline() {
  sources_.resize(board_.size());
  for (int rank = 0; rank < board_.size(); ++rank) sources_[rank] = board_.inline_data(rank, ticket_);
  kernels::reduce_n(job_.out, sources_, job_.count, job_.dtype, job_.op, job_.postscale);
}

void NodeAllReduce::waiting_for(std::vector<int>& ranks) const {
  if (outcome_ != Outcome::kNone) return;
  if (phase_ == Phase::kEntered) {
    everybody_->waiting_for(ranks);
  } else {
    two_shot_.waiting_for(ranks);
  }
}

}  // namespace dcoll
