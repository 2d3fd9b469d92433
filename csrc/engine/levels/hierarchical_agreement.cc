#include "engine/levels/hierarchical_agreement.h"

#include <string>

#include "engine/core/memory.h"
#include "kernels/reduce.h"

namespace dcoll {
HierarchicalAgreement::HierarchicalAgreement(Hierarchy& hierarchy, uint64_t fingerprint, const ReduceJob* job)
    : h_(hierarchy),
      fingerprint_(fingerprint),
      job_(job),
      small_(job != nullptr && !job->coded.encoding && job->bytes() <= hierarchy.small_bytes()) {}

bool HierarchicalAgreement::poll(bool& moved) {
  const Phase before = phase_;
  if (phase_ == Phase::kConnect) {
    if (!h_.connected()) {
      if (!h_.board().complete(h_.first_post())) return false;
      h_.learn();
    }
    show();
  }
  if (phase_ == Phase::kShown && h_.board().complete(ticket_)) begin_exchange();
  if (phase_ == Phase::kExchange && exchange_->poll(moved)) tell_verdict();
  if (phase_ == Phase::kVerdict && take_verdict()) phase_ = Phase::kDone;
  moved |= phase_ != before;
  return phase_ == Phase::kDone;
}

void HierarchicalAgreement::show() {
  BoardEntry::Post post{fingerprint_, Window::kUnmapped, Window::kUnmapped, 0};
  if (small_) {
    const size_t bytes = job_->bytes();
    std::byte* to = bytes <= Board::kInlineBytes ? h_.board().next_inline_data()
                                                 : h_.small_slot(h_.local_rank(), h_.board().next_ticket());
    kernels::scale(to, job_->in, job_->count, job_->dtype, job_->prescale);
  } else if (job_ != nullptr) {
    // An operand that has to be scaled first cannot be read in place.
    Window& window = h_.board().window();
    if (job_->prescale == 1.0) post.offset_in = window.offset_of(job_->in, job_->bytes());
    post.offset_out = window.offset_of(job_->out, job_->bytes());
  }
  ticket_ = h_.board().post(post);
  phase_ = h_.leads() ? Phase::kShown : Phase::kVerdict;
}

const std::byte* HierarchicalAgreement::operand(int local) const {
  return job_->bytes() <= Board::kInlineBytes ? h_.board().inline_data(local, ticket_) : h_.small_slot(local, ticket_);
}

// All ranks of the node have shown what they called.
void HierarchicalAgreement::begin_exchange() {
  FingerprintRange range{fingerprint_, fingerprint_};
  for (int local = 1; local < h_.local_size(); ++local) {
    const uint64_t theirs = h_.board().at(local, ticket_).fingerprint;
    range.include({theirs, theirs});
  }
  if (small_ && range.equal()) reduce_node();  // else the ranks may have brought operands of different lengths
  exchange_.emplace(h_.leaders(), range, sum_, h_.map().num_nodes() <= static_cast<int>(plan::kMaxDirectNodes));
  phase_ = Phase::kExchange;
}

void HierarchicalAgreement::reduce_node() {
  sum_.resize(job_->bytes());
  for (int local = 0; local < h_.local_size(); ++local) sources_.push_back(operand(local));
  kernels::reduce_n(sum_.data(), sources_, job_->count, job_->dtype, job_->op);
}

// Every leader is known to have shown the same, or not.
void HierarchicalAgreement::tell_verdict() {
  NodeShared::Verdict& verdict = h_.own().verdict;
  equal_ = exchange_->equal();
  verdict.equal = equal_;
  if (reduced()) {
    sources_.clear();
    for (int node = 0; node < h_.map().num_nodes(); ++node) {
      sources_.push_back(node == h_.map().node ? sum_.data() : exchange_->operand(node));
    }
    const size_t bytes = job_->bytes();
    // Over this rank's own operand, which only this rank has read.
    std::byte* result = bytes <= NodeShared::Verdict::kInlineBytes ? verdict.result : h_.small_slot(0, ticket_);
    kernels::reduce_n(result, sources_, job_->count, job_->dtype, job_->op, job_->postscale);
  }
  verdict.ticket.store(ticket_, std::memory_order_release);
  h_.tell_missing({});
  h_.board().window().notify_all();
  phase_ = Phase::kVerdict;
}

bool HierarchicalAgreement::take_verdict() {
  const NodeShared::Verdict& verdict = h_.shared(0).verdict;
  const uint64_t told = verdict.ticket.load(std::memory_order_acquire);
  if (told < ticket_) return false;
  const uint64_t equal = read_once(verdict.equal);
  if (told > ticket_ || equal > 1) [[unlikely]] {
    h_.board().throw_damaged(0, " tells of post " + std::to_string(told) + " where " + std::to_string(ticket_) +
                                    " is the last that can have been made, or no verdict");
  }
  equal_ = equal != 0;
  if (!reduced()) return true;
  const size_t bytes = job_->bytes();
  copy_bytes(job_->out, bytes <= NodeShared::Verdict::kInlineBytes ? verdict.result : h_.small_slot(0, ticket_), bytes);
  return true;
}

void HierarchicalAgreement::waiting_for(std::vector<int>& ranks) const {
  const size_t first = ranks.size();
  switch (phase_) {
    case Phase::kConnect:
    case Phase::kShown:
      h_.add_absent(phase_ == Phase::kConnect ? h_.first_post() : ticket_, ranks);
      break;
    case Phase::kExchange:
      exchange_->waiting_for(ranks);
      break;
    case Phase::kVerdict:
      h_.add_missing(0, ranks);
      return;
    case Phase::kDone:
      return;
  }
  h_.tell_missing({ranks.begin() + static_cast<std::ptrdiff_t>(first), ranks.end()});
}

NodeBarrier::NodeBarrier(Hierarchy& hierarchy, uint64_t fingerprint)
    : h_(hierarchy), ticket_(hierarchy.board().post({fingerprint, Window::kUnmapped, Window::kUnmapped, 0})) {}

bool NodeBarrier::poll(bool& moved) {
  if (!h_.board().complete(ticket_)) return false;
  moved = true;
  return true;
}

}  // namespace dcoll
