#include "engine/node/node_all_reduce.h"

#include "engine/core/timeline_record.h"

namespace dcoll {
Span NodeAllReduce::own_slice(const Call& call) const {
  const size_t bytes = call.count * dtype_bytes(call.dtype);
  const bool mapped = bytes > kInPlaceBytes && board_.window().offset_of(call.out, bytes) != Window::kUnmapped;
  if (!mapped || !call.packed || call.in != call.out || call.prescale != 1.0) return {};
  return TwoShot::slice(bytes, board_.rank(), board_.size());
}

void NodeAllReduce::enter(uint64_t fingerprint) {
  const ReduceJob& job = job_;
  phase_ = Phase::kEntered;
  outcome_ = Outcome::kNone;
  const size_t bytes = job.bytes();
  BoardEntry::Post post{fingerprint, Window::kUnmapped, Window::kUnmapped, job.count};
  if (bytes > kInPlaceBytes) {
    post.offset_in = board_.window().offset_of(job.in, bytes);
    post.offset_out = board_.window().offset_of(job.out, bytes);
  }
  if (bytes > slots_.one_shot_bytes()) {
    if (!post.mapped()) Staged::fill_first(board_, slots_, job);
  } else if (bytes <= Board::kInlineBytes) {
    show_operand(board_.next_inline_data());
  } else if (!post.mapped()) {
    show_operand(slots_.slot(board_.rank(), board_.next_ticket()));
  }
  if (job.timed) [[unlikely]]
    entered_ns_ = now_ns();
  ticket_ = board_.post(post);
  everybody_.emplace(board_, ticket_);
  prepare();
}

bool NodeAllReduce::poll(bool& moved) {
  if (outcome_ != Outcome::kNone) return true;
  if (phase_ == Phase::kEntered) {
    if (!everybody_->poll(moved)) return false;
    choose_form();
    if (outcome_ != Outcome::kNone) return true;
  }
  if (phase_ == Phase::kFirstPieces) {
    if (!everybody_->poll(moved)) return false;
    stage();
  }
  if (phase_ == Phase::kTwoShot) {
    if (!two_shot_.poll(moved)) return false;
  } else if (phase_ == Phase::kStaged) {
    if (!staged_.poll(moved)) return false;
  } else {
    if (!everybody_->poll(moved)) return false;
    reduce_all();
  }
  done();
  return true;
}

void NodeAllReduce::choose_form() {
  if (job_.timed) [[unlikely]]
    agreed_ns_ = now_ns();
  const size_t bytes = job_.bytes();
  if (!board_.fingerprints_equal(ticket_)) {
    outcome_ = Outcome::kMismatch;
    return;
  }
  const int mapped = bytes <= Board::kInlineBytes ? 0 : board_.count_mapped(ticket_);
  if (mapped == 0 && bytes <= slots_.one_shot_bytes()) {
    reduce_all();
    done();
  } else if (mapped == board_.size()) {
    two_shot_.begin(ticket_);
    phase_ = Phase::kTwoShot;
  } else if (bytes <= slots_.one_shot_bytes()) {
    fill_and_post();
  } else if (mapped > 0 && job_.prescale != 1.0) {
    fill_first_pieces_and_post();
  } else {
    stage();
  }
}

// The post ticket_ says of each rank that operand and result are mapped, or else that its first piece is in the slot.
void NodeAllReduce::stage() {
  staged_.begin(ticket_);
  phase_ = Phase::kStaged;
}

const char* NodeAllReduce::form() const {
  if (phase_ == Phase::kStaged) return "staged";
  if (phase_ == Phase::kTwoShot) return "two-shot";
  return job_.bytes() <= Board::kInlineBytes ? "inline" : "slots";
}

const char* NodeAllReduce::form_of(size_t bytes, bool mapped) const {
  if (bytes <= Board::kInlineBytes) return "inline";
  if (mapped && bytes > kInPlaceBytes) return "two-shot";
  return bytes <= slots_.one_shot_bytes() ? "slots" : "staged";
}

// All ranks fill the slots of the second post, also those that filled the first's: those will be filled again before
// the peers are known to have read them.
void NodeAllReduce::fill_and_post() {
  show_operand(slots_.slot(board_.rank(), board_.next_ticket()));
  ticket_ = board_.post({});
  everybody_.emplace(board_, ticket_);
  prepare();
  phase_ = Phase::kInSlots;
}

// Operands that have to be scaled first cannot be read in place, so those that are mapped go through the slots too.
void NodeAllReduce::fill_first_pieces_and_post() {
  if (board_.at(board_.rank(), ticket_).mapped()) Staged::fill_first(board_, slots_, job_);
  ticket_ = board_.post({.offset_in = Window::kUnmapped, .offset_out = Window::kUnmapped});
  everybody_.emplace(board_, ticket_);
  phase_ = Phase::kFirstPieces;
}

void NodeAllReduce::done() {
  outcome_ = Outcome::kDone;
  board_.fetch_next_record();
}

// Copies this rank's operand, scaled, to a place where its peers read it.
void NodeAllReduce::show_operand(std::byte* place) const {
  kernels::copy_scaled(place, job_.in, job_.bytes(), job_.dtype, job_.prescale);
}

void NodeAllReduce::prepare() {
  reduction_ = {job_.dtype, job_.op, job_.postscale};
  if (job_.bytes() <= Board::kInlineBytes) {
    for (int rank = 0; rank < board_.size(); ++rank) sources_[rank] = board_.inline_data(rank, ticket_);
  } else if (job_.bytes() <= slots_.one_shot_bytes()) {
    for (int rank = 0; rank < board_.size(); ++rank) sources_[rank] = slots_.slot(rank, ticket_);
  }
}

// Once all ranks have shown theirs.
void NodeAllReduce::reduce_all() {
  void* const out = job_.out;
  reduction_.run({&out, 1}, sources_, job_.count);
}

void NodeAllReduce::waiting_for(std::vector<int>& ranks) const {
  if (outcome_ != Outcome::kNone) return;
  if (phase_ == Phase::kTwoShot) {
    two_shot_.waiting_for(ranks);
  } else if (phase_ == Phase::kStaged) {
    staged_.waiting_for(ranks);
  } else {
    everybody_->waiting_for(ranks);
  }
}

}  // namespace dcoll
