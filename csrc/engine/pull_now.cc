#include "engine/pull_now.h"

#include <cstring>

#include "kernels/reduce.h"

namespace dcoll {
namespace {

constexpr uint64_t kMostBytes = uint64_t{8} << 20;

void copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

}  // namespace

void PullNow::enter(const PullCall& call) {
  call_ = call;
  if (call.kind == Kind::kBarrier) {
    ticket_ = board_.post({call.fingerprint()});
  } else {
    ticket_ = Pull::enter(board_, slots_, call);
    mine_.emplace(call, board_.rank(), board_.size());
  }
  everybody_.emplace(board_, ticket_);
  phase_ = Phase::kEntered;
}

bool PullNow::poll(Operation* operation, bool& moved) {
  if (phase_ == Phase::kEntered) {
    if (!everybody_->poll(moved)) return false;
    if (!take(operation)) {
      phase_ = Phase::kLeft;
      return true;
    }
    if (in_place_) {
      ticket_ = board_.post({});
      everybody_.emplace(board_, ticket_);
    }
    phase_ = Phase::kTaken;
  }
  if (!everybody_->poll(moved)) return false;
  phase_ = Phase::kDone;
  board_.fetch_next_record();
  return true;
}

// Everybody has entered. False: nothing was done that run_collective would not do again.
bool PullNow::take(Operation* operation) {
  if (!board_.fingerprints_equal(ticket_) || !all_at_hand()) return false;
  if (operation != nullptr && call_.kind != Kind::kBarrier) {
    operation->phases.enter(dcoll::Phase::kMove);
    operation->phases.name_algorithm("pull");
  }
  try {
    switch (call_.kind) {
      case Kind::kBroadcast:
        copy_block(call_.root, static_cast<std::byte*>(call_.out), call_.count);
        break;
      case Kind::kAllGather:
      case Kind::kAllToAll:
        return gather(operation);
      case Kind::kReduceScatter:
        reduce();
        break;
      case Kind::kBarrier:
      case Kind::kAllReduce:
      case Kind::kShutdown:
      case Kind::kJoin:
        break;
    }
  } catch (const std::exception&) {
    return false;  // no memory, or a peer's has gone: run_collective meets it again, as everybody's failure
  }
  return true;
}

// Whether all there is can be taken now: in place, beside the posts or in the slots, and not so much that the driver
// has to look around meanwhile.
bool PullNow::all_at_hand() {
  in_place_ = false;
  if (call_.kind == Kind::kBarrier) return true;
  const size_t cell_bytes = slots_.cell_bytes(mine_->blocks());
  uint64_t bytes = 0;
  for (int rank = 0; rank < board_.size(); ++rank) {
    const BoardEntry::Post& post = board_.at(rank, ticket_);
    const uint64_t longest = Pull::longest_block(call_, board_.size(), rank, post);
    if (post.offset_in != Window::kUnmapped) {
      in_place_ = true;
    } else if (longest > cell_bytes) {
      return false;
    }
    bytes += longest;
  }
  return bytes <= kMostBytes;
}

Pull::Rows PullNow::rows_from(int rank) const {
  if (call_.kind == Kind::kAllGather) return {0, board_.at(rank, ticket_).value};
  return Pull::rows_from(board_, slots_, ticket_, rank);
}

// Of the block of `rank` for this one, in that rank's operand.
uint64_t PullNow::begin_of(int rank) const {
  if (call_.kind == Kind::kAllToAll) return rows_from(rank).begin * call_.row_elems;
  return mine_->blocks() > 1 ? mine_->begin(static_cast<size_t>(board_.rank())) : 0;
}

// Where it lies in memory of this process.
const std::byte* PullNow::block_of(int rank) const {
  const BoardEntry::Post& post = board_.at(rank, ticket_);
  if (rank == board_.rank() && !mine_->is_prescaled()) return mine_->data() + begin_of(rank);
  if (Pull::is_inline(call_, board_.size(), post)) return board_.inline_data(rank, ticket_) + begin_of(rank);
  if (post.offset_in != Window::kUnmapped) return board_.window().base(rank) + post.offset_in + begin_of(rank);
  const size_t cell = mine_->blocks() > 1 ? static_cast<size_t>(board_.rank()) : 0;
  return slots_.cells(rank, ticket_) + cell * slots_.cell_bytes(mine_->blocks());
}

bool PullNow::lies_in_slot(int rank) const {
  const BoardEntry::Post& post = board_.at(rank, ticket_);
  if (rank == board_.rank() && !mine_->is_prescaled()) return false;
  return post.offset_in == Window::kUnmapped && !Pull::is_inline(call_, board_.size(), post);
}

void PullNow::copy_block(int rank, std::byte* to, uint64_t bytes) const {
  const uint64_t offset = board_.at(rank, ticket_).offset_in;
  if (rank != board_.rank() && offset != Window::kUnmapped && (offset & Pull::kForeign) != 0) {
    slots_.read_peer(rank, to, (offset & ~Pull::kForeign) + begin_of(rank), bytes);
  } else {
    copy(to, block_of(rank), bytes);
    if (lies_in_slot(rank) && slots_.has_one_reader(call_.kind)) PullSlots::take_over(block_of(rank), bytes);
  }
}

bool PullNow::gather(Operation* operation) {
  uint64_t rows = 0;
  for (int rank = 0; rank < board_.size(); ++rank) rows += rows_from(rank).count;
  const size_t bytes = rows * call_.row_elems;
  if (operation == nullptr && bytes != call_.out_bytes) return false;
  auto* to = operation != nullptr ? operation->place_output(bytes) : static_cast<std::byte*>(call_.out);
  if (operation != nullptr) operation->counts.clear();
  for (int rank = 0; rank < board_.size(); ++rank) {
    const uint64_t count = rows_from(rank).count;
    if (operation != nullptr) operation->counts.push_back(static_cast<int64_t>(count));
    copy_block(rank, to, count * call_.row_elems);
    to += count * call_.row_elems;
  }
  return true;
}

void PullNow::reduce() {
  const size_t me = static_cast<size_t>(board_.rank());
  operands_.clear();
  results_.assign(1, call_.out);
  for (int rank = 0; rank < board_.size(); ++rank) {
    operands_.push_back(block_of(rank));
    if (lies_in_slot(rank)) results_.push_back(const_cast<void*>(operands_.back()));  // takes the lines over
  }
  const size_t bytes = mine_->begin(me + 1) - mine_->begin(me);
  kernels::reduce_n_to_n(results_, operands_, bytes / dtype_bytes(call_.dtype), call_.dtype, call_.op,
                         final_scale(call_.op, call_.postscale, board_.size()));
}

}  // namespace dcoll
