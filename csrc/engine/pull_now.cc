#include "engine/pull_now.h"

#include <cstring>

#include "kernels/reduce.h"

namespace dcoll {
namespace {

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
}

bool PullNow::poll() {
  bool moved = false;
  return everybody_->poll(moved);
}

bool PullNow::finish(Operation* operation) {
  if (!board_.fingerprints_equal(ticket_) || !all_at_hand()) return false;
  bool done = true;
  try {
    switch (call_.kind) {
      case Kind::kBroadcast:
        copy(call_.out, block_of(call_.root), call_.count);
        break;
      case Kind::kAllGather:
      case Kind::kAllToAll:
        done = gather(operation);
        break;
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
    return false;  // no memory, say: run_collective meets it again, and there it becomes everybody's failure
  }
  if (done) board_.fetch_next_record();
  return done;
}

// Whether everything lies beside the posts or in the slots, and is little.
bool PullNow::all_at_hand() const {
  if (call_.kind == Kind::kBarrier) return true;
  const size_t cell_bytes = slots_.cell_bytes(mine_->blocks());
  uint64_t bytes = 0;
  for (int rank = 0; rank < board_.size(); ++rank) {
    const BoardEntry::Post& post = board_.at(rank, ticket_);
    const uint64_t longest = Pull::longest_block(call_, board_.size(), rank, post);
    if (post.offset_in != Window::kUnmapped || longest > cell_bytes) return false;
    bytes += longest;
  }
  return bytes <= Pull::kPieceBytes;
}

Pull::Rows PullNow::rows_from(int rank) const {
  if (call_.kind == Kind::kAllGather) return {0, board_.at(rank, ticket_).value};
  return Pull::rows_from(board_, slots_, ticket_, rank);
}

// The block of `rank` for this one.
const std::byte* PullNow::block_of(int rank) const {
  const size_t me = mine_->blocks() > 1 ? static_cast<size_t>(board_.rank()) : 0;
  if (rank == board_.rank() && !mine_->is_prescaled()) return mine_->data() + mine_->begin(me);
  if (Pull::is_inline(call_, board_.size(), board_.at(rank, ticket_))) {
    const uint64_t begin = call_.kind == Kind::kAllToAll ? rows_from(rank).begin * call_.row_elems : mine_->begin(me);
    return board_.inline_data(rank, ticket_) + begin;
  }
  return slots_.cells(rank, ticket_) + me * slots_.cell_bytes(mine_->blocks());
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
    copy(to, block_of(rank), count * call_.row_elems);
    to += count * call_.row_elems;
  }
  return true;
}

void PullNow::reduce() {
  const size_t me = static_cast<size_t>(board_.rank());
  operands_.resize(static_cast<size_t>(board_.size()));
  for (int rank = 0; rank < board_.size(); ++rank) operands_[static_cast<size_t>(rank)] = block_of(rank);
  const size_t bytes = mine_->begin(me + 1) - mine_->begin(me);
  kernels::reduce_n(call_.out, operands_, bytes / dtype_bytes(call_.dtype), call_.dtype, call_.op,
                    final_scale(call_.op, call_.postscale, board_.size()));
}

}  // namespace dcoll
