#include "engine/direct_collectives.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "engine/layout.h"
#include "kernels/reduce.h"

namespace dcoll {
namespace {

// Mapped operands of up to this size go through the slot all the same: the copy costs less than the barrier that ends
// reading in place.
constexpr size_t kSlotBytes = 16 << 10;

constexpr size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// Where each rank's share of `rows` begins, and the end of the last, in bytes.
std::vector<uint64_t> even_begins(size_t rows, size_t row_bytes, int size) {
  const Layout shares = Layout::even(rows, size);
  std::vector<uint64_t> begins;
  for (int rank = 0; rank < size; ++rank) begins.push_back(shares.chunk(rank).begin * row_bytes);
  begins.push_back(rows * row_bytes);
  return begins;
}

std::vector<uint64_t> begins_of_splits(const std::vector<size_t>& splits, size_t unit_bytes) {
  std::vector<uint64_t> begins{0};
  for (const size_t split : splits) begins.push_back(begins.back() + split * unit_bytes);
  return begins;
}

void copy(std::byte* to, const std::byte* from, size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

std::vector<uint64_t> begins_of_blocks(const Request& r, int rank, int size) {
  switch (r.kind) {
    case Kind::kBroadcast:
      return {0, rank == r.root ? r.count : 0};
    case Kind::kAllGather:
      return {0, r.count * r.row_elems};
    case Kind::kReduceScatter:
      if (!r.splits.empty()) return begins_of_splits(r.splits, dtype_bytes(r.dtype));
      return even_begins(r.count, r.row_elems * dtype_bytes(r.dtype), size);
    case Kind::kAllToAll:
      return begins_of_splits(r.splits, r.row_elems);
    case Kind::kAllReduce:
    case Kind::kBarrier:
    case Kind::kShutdown:
    case Kind::kJoin:
      break;
  }
  return {0, 0};
}

}  // namespace

PullSlots::PullSlots(std::shared_ptr<Window> window, Board& board)
    : board_(board),
      table_bytes_(round_up((board.size() + 1) * sizeof(uint64_t), Memory::kAlignment)),
      data_bytes_(std::max<size_t>(kDataBytes, board.size() * kLeastCellBytes)),
      slot_bytes_(table_bytes_ + data_bytes_),
      memory_(Memory::mapped(window, kSlots * slot_bytes_)),
      own_offset_(window->offset_of(memory_->data(), kSlots * slot_bytes_)),
      slots_(board.size()) {
  slots_[window->local_rank()] = memory_->data();
}

void PullSlots::learn(uint64_t ticket) {
  for (int rank = 0; rank < board_.size(); ++rank) {
    slots_[rank] = board_.window().base(rank) + board_.at(rank, ticket).offset_in;
  }
}

Contribution::Contribution(const Request& r, int rank, int size)
    : data(static_cast<const std::byte*>(r.in)),
      begins(begins_of_blocks(r, rank, size)),
      dtype(r.dtype),
      prescale(r.kind == Kind::kReduceScatter ? r.prescale : 1.0),
      // A prescaled block has to be scaled before this rank reduces it, as everybody else's.
      skip(blocks() > 1 && prescale == 1.0 ? rank : -1) {}

size_t Contribution::longest() const {
  uint64_t most = 0;
  for (size_t b = 0; b < blocks(); ++b) most = std::max(most, begins[b + 1] - begins[b]);
  return most;
}

void Contribution::lay_out(std::byte* cells, size_t cell_bytes, size_t round) const {
  for (size_t b = 0; b < blocks(); ++b) {
    const uint64_t begin = begins[b] + round * cell_bytes;
    if (static_cast<int>(b) == skip || begin >= begins[b + 1]) continue;
    const size_t bytes = std::min<uint64_t>(cell_bytes, begins[b + 1] - begin);
    std::byte* cell = cells + b * cell_bytes;
    if (prescale != 1.0) {
      kernels::scale(cell, data + begin, bytes / dtype_bytes(dtype), dtype, prescale);
    } else {
      std::memcpy(cell, data + begin, bytes);
    }
  }
}

bool Pull::suits(Kind kind) {
  switch (kind) {
    case Kind::kBroadcast:
    case Kind::kAllGather:
    case Kind::kReduceScatter:
    case Kind::kAllToAll:
      return true;
    case Kind::kAllReduce:
    case Kind::kBarrier:
    case Kind::kShutdown:
    case Kind::kJoin:
      break;
  }
  return false;
}

uint64_t Pull::enter(Board& board, PullSlots& slots, const Request& r) {
  const int rank = board.window().local_rank();
  const Contribution mine(r, rank, board.size());
  BoardEntry::Post post{r.fingerprint(), Window::kUnmapped, Window::kUnmapped, r.count};
  if (mine.bytes() > kSlotBytes && mine.prescale == 1.0) {
    post.offset_in = board.window().offset_of(mine.data, mine.bytes());
  }
  const uint64_t ticket = board.next_ticket();
  if (r.kind == Kind::kAllToAll) {
    uint64_t* table = slots.table(rank, ticket);
    table[0] = 0;
    for (int peer = 0; peer < board.size(); ++peer) table[peer + 1] = table[peer] + r.splits[peer];
    post.value = mine.longest();
  }
  if (post.offset_in == Window::kUnmapped) {
    mine.lay_out(slots.cells(rank, ticket), slots.cell_bytes(mine.blocks()), 0);
  }
  return board.post(post);
}

Pull::Pull(Board& board, PullSlots& slots, Operation& operation, uint64_t ticket)
    : board_(board),
      slots_(slots),
      operation_(operation),
      mine_(operation.request, board.window().local_rank(), board.size()),
      cell_bytes_(slots.cell_bytes(mine_.blocks())),
      ticket_(ticket) {
  count_rounds();
}

// From the posts, so that all ranks count the same.
void Pull::count_rounds() {
  const Request& r = operation_.request;
  auto longest_of = [&](int rank) -> uint64_t {  // blocks of `rank`
    const uint64_t value = board_.at(rank, ticket_).value;
    if (r.kind == Kind::kAllGather) return value * r.row_elems;
    if (r.kind == Kind::kBroadcast) return rank == r.root ? value : 0;
    return r.kind == Kind::kAllToAll ? value : mine_.longest();
  };
  read_in_place_ = board_.at(board_.window().local_rank(), ticket_).offset_in != Window::kUnmapped;
  for (int rank = 0; rank < board_.size(); ++rank) {
    if (board_.at(rank, ticket_).offset_in != Window::kUnmapped) {
      in_place_ = true;
    } else {
      rounds_ = std::max<size_t>(rounds_, (longest_of(rank) + cell_bytes_ - 1) / cell_bytes_);
    }
  }
}

void Pull::find_sources() {
  const Request& r = operation_.request;
  const int size = board_.size(), me = board_.window().local_rank();
  found_ = true;
  sources_.reserve(size);
  switch (r.kind) {
    case Kind::kBroadcast:
      add_source(r.root, 0, r.count, static_cast<std::byte*>(r.out));
      break;
    case Kind::kAllGather:
      add_all_gather_sources();
      break;
    case Kind::kReduceScatter:
      for (int rank = 0; rank < size; ++rank) {
        add_source(rank, mine_.begins[me], mine_.begins[me + 1] - mine_.begins[me], nullptr);
      }
      operands_.resize(size);
      break;
    case Kind::kAllToAll:
      add_all_to_all_sources();
      break;
    case Kind::kAllReduce:
    case Kind::kBarrier:
    case Kind::kShutdown:
    case Kind::kJoin:
      break;
  }
  // Peers are taken in the order of their distance, so that no rank is everybody's first. A reduction keeps rank order.
  if (sources_.size() > 1 && r.kind != Kind::kReduceScatter) {
    std::rotate(sources_.begin(), sources_.begin() + me, sources_.end());
  }
}

// The block of `rank` for this rank, which begins at `begin` of its operand.
void Pull::add_source(int rank, uint64_t begin, uint64_t bytes, std::byte* to) {
  const uint64_t offset = board_.at(rank, ticket_).offset_in;
  const std::byte* in_place = nullptr;
  if (rank == board_.window().local_rank()) {
    if (mine_.prescale == 1.0) in_place = mine_.data + begin;
  } else if (offset != Window::kUnmapped) {
    in_place = board_.window().base(rank) + offset + begin;
  }
  sources_.push_back({in_place, rank, bytes, to, 0});
}

std::byte* Pull::place_output() {
  uint64_t rows = 0;
  for (const int64_t count : operation_.counts) rows += static_cast<uint64_t>(count);
  return operation_.place_output(rows * operation_.request.row_elems);
}

void Pull::add_all_gather_sources() {
  std::vector<int64_t>& counts = operation_.counts;
  counts.resize(board_.size());
  for (int rank = 0; rank < board_.size(); ++rank) {
    counts[rank] = static_cast<int64_t>(board_.at(rank, ticket_).value);
  }
  std::byte* to = place_output();
  for (int rank = 0; rank < board_.size(); ++rank) {
    const uint64_t bytes = static_cast<uint64_t>(counts[rank]) * operation_.request.row_elems;
    add_source(rank, 0, bytes, to);
    to += bytes;
  }
}

void Pull::add_all_to_all_sources() {
  const size_t row_bytes = operation_.request.row_elems;
  const int me = board_.window().local_rank();
  std::vector<int64_t>& counts = operation_.counts;
  counts.resize(board_.size());
  for (int rank = 0; rank < board_.size(); ++rank) {
    const uint64_t* table = slots_.table(rank, ticket_);
    counts[rank] = static_cast<int64_t>(table[me + 1] - table[me]);
  }
  std::byte* to = place_output();
  for (int rank = 0; rank < board_.size(); ++rank) {
    const uint64_t bytes = static_cast<uint64_t>(counts[rank]) * row_bytes;
    add_source(rank, slots_.table(rank, ticket_)[me] * row_bytes, bytes, to);
    to += bytes;
  }
}

bool Pull::poll(bool& moved) {
  while (round_ < rounds_) {
    if (!board_.complete(ticket_)) return false;
    moved = true;
    if (!found_) find_sources();
    if (!take()) return false;  // more to take, after the driver has looked around
    if (++round_ < rounds_) {
      const uint64_t next = board_.next_ticket();
      const int me = board_.window().local_rank();
      if (!read_in_place_) mine_.lay_out(slots_.cells(me, next), cell_bytes_, round_);
    }
    if (round_ < rounds_ || in_place_) ticket_ = board_.post({});
  }
  return !in_place_ || board_.complete(ticket_);
}

void Pull::waiting_for(std::vector<int>& ranks) const { BoardWait(board_, ticket_).waiting_for(ranks); }

// Where a source's block is taken in this round: the last one takes all that is left of those read in place.
uint64_t Pull::round_end(uint64_t bytes) const {
  return round_ + 1 == rounds_ ? bytes : std::min<uint64_t>(bytes, (round_ + 1) * cell_bytes_);
}

const std::byte* Pull::piece(const Source& source) const {
  if (source.in_place != nullptr) return source.in_place + source.taken;
  const size_t cell = mine_.blocks() > 1 ? static_cast<size_t>(board_.window().local_rank()) : 0;
  return slots_.cells(source.rank, ticket_) + cell * cell_bytes_ + (source.taken - round_ * cell_bytes_);
}

// Takes what this round brings, at most kPieceBytes; true when that was all.
bool Pull::take() { return operands_.empty() ? copy_some() : reduce_some(); }

bool Pull::copy_some() {
  uint64_t room = kPieceBytes;
  for (; next_ < sources_.size(); ++next_) {
    Source& source = sources_[next_];
    const uint64_t bytes = std::min(room, round_end(source.bytes) - source.taken);
    copy(source.to + source.taken, piece(source), bytes);
    source.taken += bytes;
    room -= bytes;
    if (source.taken < round_end(source.bytes)) return false;
  }
  next_ = 0;
  return true;
}

bool Pull::reduce_some() {
  const Request& r = operation_.request;
  const uint64_t end = round_end(sources_[0].bytes), taken = sources_[0].taken;
  const uint64_t bytes = std::min<uint64_t>(kPieceBytes, end - taken);
  for (size_t i = 0; i < sources_.size(); ++i) {
    operands_[i] = piece(sources_[i]);
    sources_[i].taken += bytes;
  }
  kernels::reduce_n(static_cast<std::byte*>(r.out) + taken, operands_, bytes / dtype_bytes(r.dtype), r.dtype, r.op,
                    final_scale(r.op, r.postscale, board_.size()));
  return taken + bytes == end;
}

PullNow::PullNow(Board& board, PullSlots& slots, Operation& operation)
    : board_(board),
      slots_(slots),
      operation_(operation),
      ticket_(operation.request.kind == Kind::kBarrier ? board.post({operation.request.fingerprint()})
                                                       : Pull::enter(board, slots, operation.request)),
      everybody_(board, ticket_) {}

bool PullNow::poll() {
  bool moved = false;
  return everybody_.poll(moved);
}

bool PullNow::finish() {
  if (!board_.fingerprints_equal(ticket_)) return false;
  if (operation_.request.kind == Kind::kBarrier) return true;
  try {
    Pull pull(board_, slots_, operation_, ticket_);
    bool moved = false;
    return pull.ready() && pull.poll(moved);
  } catch (const std::exception&) {
    return false;  // no memory, say: run_collective meets it again, and there it becomes everybody's failure
  }
}

}  // namespace dcoll
