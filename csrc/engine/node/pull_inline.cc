#include "engine/node/pull_inline.h"

#include <cstring>

#include "kernels/reduce.h"

namespace dcoll {
namespace {

constexpr uint64_t kMostBytes = uint64_t{8} << 20;

}  // namespace

void PullNow::enter(const Call& call) {
  if (call.kind == Kind::kBarrier) {
    call_.kind = call.kind;  // all that is asked of one
    ticket_ = board_.post({call.fingerprint()});
  } else {
    call_ = call;
    ticket_ = Pull::enter(board_, slots_, call);
    mine_.emplace(call, board_.rank(), board_.size());
  }
  everybody_.emplace(board_, ticket_);
  phase_ = Phase::kEntered;
}

bool PullNow::poll(Operation* operation, bool& moved) {
  try {
    return advance(operation, moved);
  } catch (const std::exception&) {
    // No memory, or a peer's has gone or is damaged: run_collective meets it again, as everybody's failure.
    if (phase_ == Phase::kEntered) phase_ = Phase::kLeft;
    return true;
  }
}

bool PullNow::advance(Operation* operation, bool& moved) {
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
    std::string_view form = Pull::kInPlace;
    for (const Pull::Block& block : blocks_) form = Pull::form_with(block, form);
    operation->phases.name_algorithm(form);
  }
  if (is_ragged(call_.kind)) return gather(operation);
  if (call_.kind == Kind::kBroadcast) copy_block(blocks_[0], call_.root, static_cast<std::byte*>(call_.out));
  if (call_.kind == Kind::kReduceScatter) reduce();
  return true;
}

// Whether all there is can be taken now: in place, beside the posts or in the slots, and not so much that the driver
// has to look around meanwhile. Fills blocks_: by rank, of a broadcast the root's alone.
bool PullNow::all_at_hand() {
  in_place_ = false;
  if (call_.kind == Kind::kBarrier) return true;
  const size_t cell_bytes = slots_.cell_bytes(mine_->blocks());
  uint64_t bytes = 0;
  const Pull::Blocks posted(board_, slots_, call_, *mine_, ticket_);
  const bool from_root = call_.kind == Kind::kBroadcast;
  const int first = from_root ? call_.root : 0, end = from_root ? first + 1 : board_.size();
  blocks_.resize(static_cast<size_t>(end - first));
  for (int rank = first; rank < end; ++rank) {
    Pull::Block& block = blocks_[static_cast<size_t>(rank - first)];
    posted.read(rank, block);
    if (!block.through_slots) {
      in_place_ = true;
    } else if (block.longest > cell_bytes) {
      return false;
    }
    bytes += block.longest;
  }
  return bytes <= kMostBytes;
}

// Where a block of `rank` lies in memory of this process.
const std::byte* PullNow::at(const Pull::Block& block, int rank) const {
  if (!block.in_cell) return block.at;
  const size_t cell = mine_->blocks() > 1 ? static_cast<size_t>(board_.rank()) : 0;
  return slots_.cells(rank, ticket_) + cell * slots_.cell_bytes(mine_->blocks());
}

void PullNow::copy_block(const Pull::Block& block, int rank, std::byte* to) const {
  if (block.foreign != 0) return slots_.read_peer(rank, to, block.foreign, block.bytes);
  const std::byte* from = at(block, rank);
  copy_bytes(to, from, block.bytes);
  if (block.in_cell && slots_.has_one_reader(call_.kind)) PullSlots::take_over(from, block.bytes);
}

bool PullNow::gather(Operation* operation) {
  uint64_t bytes = 0;
  for (const Pull::Block& block : blocks_) bytes += block.bytes;
  if (operation == nullptr && bytes != call_.out_bytes) return false;
  auto* to = operation != nullptr ? operation->place_output(bytes) : static_cast<std::byte*>(call_.out);
  if (operation != nullptr) operation->counts.clear();
  for (int rank = 0; rank < board_.size(); ++rank) {
    if (operation != nullptr) operation->counts.push_back(static_cast<int64_t>(blocks_[rank].rows));
    if (rank != board_.rank() || !call_.skip_own) copy_block(blocks_[rank], rank, to);
    to += blocks_[rank].bytes;
  }
  return true;
}

void PullNow::reduce() {
  operands_.clear();
  results_.assign(1, call_.out);
  for (int rank = 0; rank < board_.size(); ++rank) {
    operands_.push_back(at(blocks_[rank], rank));
    if (blocks_[rank].in_cell) results_.push_back(const_cast<void*>(operands_.back()));  // takes the lines over
  }
  kernels::reduce_n_to_n(results_, operands_, blocks_[0].bytes / dtype_bytes(call_.dtype), call_.dtype, call_.op,
                         final_scale(call_.op, call_.postscale, board_.size()));
}

}  // namespace dcoll
