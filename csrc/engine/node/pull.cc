#include "engine/node/pull.h"

#include <new>
#include <string>

#include "base/error.h"
#include "kernels/reduce.h"

namespace dcoll {
namespace {

// An all-to-all that this rank shares evenly says so in its post, as rows per block, and needs no table then.
bool shares_evenly(const Call& call) {
  return std::all_of(call.splits.begin(), call.splits.end(), [&](size_t rows) { return rows == call.splits[0]; });
}

}  // namespace

PullSlots::PullSlots(std::shared_ptr<Window> window, Board& board, bool shared_cores)
    : board_(board),
      shared_cores_(shared_cores),
      word_(unlikely_word(this)),
      table_bytes_(round_up((board.size() + 1) * sizeof(uint64_t), Memory::kAlignment)),
      data_bytes_(std::max<size_t>(kDataBytes, board.size() * kLeastCellBytes)),
      slot_bytes_(table_bytes_ + data_bytes_),
      memory_(Memory::mapped(window, kSlots * slot_bytes_ + sizeof(Introduction))),
      own_offset_(window->offset_of(memory_->data(), memory_->bytes())),
      slots_(board.size()) {
  slots_[window->local_rank()] = memory_->data();
  introduction(window->local_rank()) = introduce(word_);
}

bool PullSlots::can_read_peers() {
  for (int rank = 0; rank < board_.size(); ++rank) introductions_.push_back(introduction(rank));
  for (int rank = 0; rank < board_.size(); ++rank) {
    if (rank != board_.rank() && !can_read(introductions_[rank])) return false;
  }
  return true;
}

size_t PullSlots::most_in_slots(Kind kind) const {
  // A reduction takes its operands side by side, so it cannot have them copied one by one.
  if (kind == Kind::kReduceScatter) return SIZE_MAX;
  if (shared_cores_) return 64 << 10;
  if (!has_one_reader(kind)) return 8 << 10;
  return kind == Kind::kBroadcast ? SIZE_MAX : 32 << 10;
}

void PullSlots::take_over(const std::byte* cell, size_t bytes) {
  auto* words = reinterpret_cast<volatile uint64_t*>(const_cast<std::byte*>(cell));
  constexpr size_t kWordsPerLine = Memory::kAlignment / sizeof(uint64_t);
  for (size_t i = 0; i < bytes / sizeof(uint64_t); i += kWordsPerLine) words[i] = words[i];
}

bool PullSlots::is_readable(const void* at, size_t bytes) {
  const std::span place(static_cast<const std::byte*>(at), bytes);
  std::span<const std::byte>& known = readable_[reinterpret_cast<uintptr_t>(at) / Memory::kAlignment % kReadable];
  if (known.data() == place.data() && known.size() == place.size()) return true;
  if (!dcoll::is_readable(at, bytes)) return false;
  known = place;
  return true;
}

void PullSlots::learn(uint64_t ticket) {
  for (int rank = 0; rank < board_.size(); ++rank) {
    slots_[rank] = board_.place(rank, board_.at(rank, ticket).offset_in, memory_->bytes());
  }
}

Contribution::Contribution(const Call& call, int rank, int size)
    : data_(static_cast<const std::byte*>(call.in)),
      dtype_(call.dtype),
      prescale_(call.kind == Kind::kReduceScatter ? call.prescale : 1.0),
      row_bytes_(call.row_bytes()) {
  if (call.kind == Kind::kBroadcast) {
    row_bytes_ = 1;
    rows_each_ = rank == call.root ? call.count : 0;
  } else if (call.kind == Kind::kAllGather) {
    rows_each_ = call.count;
  } else {
    blocks_ = static_cast<size_t>(size);
    rows_each_ = call.count / blocks_;
    longer_blocks_ = call.count % blocks_;
  }
  if (!shares_evenly(call)) {
    ends_.reserve(blocks_);
    uint64_t end = 0;
    for (const size_t rows : call.splits) ends_.push_back(end += rows * row_bytes_);
  }
  // A prescaled block has to be scaled before this rank reduces it, as everybody else's.
  skip_ = blocks_ > 1 && !is_prescaled() ? rank : -1;
}

size_t Contribution::longest() const {
  if (is_even()) return begin(1);
  uint64_t most = 0;
  for (size_t b = 0; b < blocks(); ++b) most = std::max(most, begin(b + 1) - begin(b));
  return most;
}

void Contribution::lay_out(std::byte* cells, size_t cell_bytes, size_t round) const {
  for (size_t b = 0; b < blocks(); ++b) {
    const uint64_t from = begin(b) + round * cell_bytes, end = begin(b + 1);
    if (static_cast<int>(b) == skip_ || from >= end) continue;
    const size_t bytes = std::min<uint64_t>(cell_bytes, end - from);
    kernels::copy_scaled(cells + b * cell_bytes, data_ + from, bytes, dtype_, prescale_);
  }
}

void Contribution::lay_out_inline(std::byte* at) const { kernels::copy_scaled(at, data_, bytes(), dtype_, prescale_); }

// What a post says: `value` is the number of bytes (broadcast) or rows (all-gather) of this rank, or the longest block
// of an all-to-all; offset_in is where the operand can be read in place; offset_out, of an all-to-all, the rows of
// every block, where they are equal. All ranks read from it, by the same rules, where a contribution lies.
uint64_t Pull::enter(Board& board, PullSlots& slots, const Call& call) {
  const int rank = board.rank();
  const Contribution mine(call, rank, board.size());
  BoardEntry::Post post{call.fingerprint(), Window::kUnmapped, Window::kUnmapped, call.count};
  if (mine.bytes() > slots.most_mapped_in_slots() && !mine.is_prescaled()) {
    post.offset_in = board.window().offset_of(mine.data(), mine.bytes());
  }
  if (post.offset_in == Window::kUnmapped && slots.reads_peers() && mine.longest() > slots.most_in_slots(call.kind) &&
      slots.is_readable(mine.data(), mine.bytes())) {
    post.offset_in = reinterpret_cast<uint64_t>(mine.data()) | kForeign;
  }
  const uint64_t ticket = board.next_ticket();
  if (call.kind == Kind::kAllToAll) {
    post.value = mine.longest();
    if (mine.is_even()) {
      post.offset_out = call.count / mine.blocks();
    } else {
      uint64_t* table = slots.table(rank, ticket);
      uint64_t rows = 0;
      write_once(table[0], rows);
      for (int peer = 0; peer < board.size(); ++peer) write_once(table[peer + 1], rows += call.splits[peer]);
    }
  }
  if (post.offset_in == Window::kUnmapped) {
    if (is_inline(call, board.size(), post.offset_out != Window::kUnmapped, mine.longest())) {
      mine.lay_out_inline(board.next_inline_data());
    } else {
      mine.lay_out(slots.cells(rank, ticket), slots.cell_bytes(mine.blocks()), 0);
    }
  }
  return board.post(post);
}

bool Pull::is_inline(const Call& call, int size, bool even, uint64_t longest) {
  if (call.kind == Kind::kAllGather) return longest <= Board::kInlineBytes;
  if (call.kind == Kind::kAllToAll) return even && longest <= Board::kInlineBytes / static_cast<size_t>(size);
  return call.count * (call.kind == Kind::kBroadcast ? 1 : call.row_bytes()) <= Board::kInlineBytes;
}

Pull::Blocks::Blocks(const Board& board, const PullSlots& slots, const Call& call, const Contribution& mine,
                     uint64_t ticket)
    : board_(board), slots_(slots), call_(call), mine_(mine), ticket_(ticket) {
  if (call.kind == Kind::kBroadcast) {
    bytes_ = longest_ = call.count;
    return;
  }
  const size_t block = mine.blocks() > 1 ? static_cast<size_t>(board.rank()) : 0;
  begin_ = mine.begin(block);
  bytes_ = mine.begin(block + 1) - begin_;
  longest_ = mine.longest();
}

void Pull::Blocks::throw_many(int rank, uint64_t rows) const {
  board_.throw_damaged(rank, " posted " + std::to_string(rows) + " rows of " + std::to_string(call_.row_elems) +
                                 " bytes, more than any memory holds");
}

void Pull::Blocks::throw_longer(int rank, const Block& block) const {
  board_.throw_damaged(rank, " posted a block of " + std::to_string(block.bytes) +
                                 " bytes, and that none is longer than " + std::to_string(block.longest));
}

void Pull::Blocks::read(int rank, Block& block) const {
  const BoardEntry::Post post = board_.at(rank, ticket_);
  const bool own = rank == board_.rank();
  block = {};
  block.through_slots = post.offset_in == Window::kUnmapped;
  block.bytes = bytes_;
  block.longest = longest_;
  uint64_t begin = begin_;
  bool even = false;
  if (call_.kind == Kind::kAllGather) {
    block.rows = own ? call_.count : post.value;
    block.bytes = block.longest = bytes_of(rank, block.rows);
  } else if (call_.kind == Kind::kAllToAll) {
    even = post.offset_out != Window::kUnmapped;
    if (own) {
      block.rows = call_.splits.empty() ? call_.count / mine_.blocks() : call_.splits[rank];
    } else {
      const size_t me = static_cast<size_t>(board_.rank());
      uint64_t first = post.offset_out * me;
      block.rows = post.offset_out;
      if (!even) {
        const uint64_t* table = slots_.table(rank, ticket_);
        first = read_once(table[me]);
        block.rows = read_once(table[me + 1]) - first;  // a huge number, if they do not ascend
      }
      block.bytes = bytes_of(rank, block.rows);
      begin = bytes_of(rank, first);
      block.longest = post.value;
      if (block.bytes > block.longest || !bytes_of_told(block.longest, 1)) [[unlikely]]
        throw_longer(rank, block);
    }
  }
  if (own && !mine_.is_prescaled()) {
    block.at = mine_.data() + begin;
  } else if (is_inline(call_, board_.size(), even, block.longest)) {
    block.at = board_.inline_data(rank, ticket_) + begin;  // all of it is taken before the next post
  } else if (block.through_slots) {
    block.in_cell = true;
  } else if ((post.offset_in & kForeign) != 0 && slots_.reads_peers() && call_.kind != Kind::kReduceScatter) {
    block.foreign = (post.offset_in & ~kForeign) + begin;
  } else {
    block.at = board_.place(rank, post.offset_in, begin + block.bytes) + begin;
  }
}

Pull::Pull(Board& board, PullSlots& slots, Operation& operation, uint64_t ticket)
    : board_(board),
      slots_(slots),
      operation_(operation),
      call_(operation.request.call()),
      mine_(call_, board.rank(), board.size()),
      cell_bytes_(slots.cell_bytes(mine_.blocks())),
      ticket_(ticket) {
  read_posts();
}

std::string_view Pull::form_with(const Block& block, std::string_view others) {
  constexpr std::string_view kSlots = "pull (slots)", kKernel = "pull (kernel)";
  if (block.foreign != 0) return kKernel;
  return block.in_cell && others == kInPlace ? kSlots : others;
}

// Once, so that what is counted here is what is read later. All ranks count the same. Of a broadcast, the root's alone.
void Pull::read_posts() {
  read_in_place_ = board_.at(board_.rank(), ticket_).offset_in != Window::kUnmapped;
  const Blocks blocks(board_, slots_, call_, mine_, ticket_);
  const auto add = [&](int rank) {
    Source& source = sources_.emplace_back();
    source.rank = rank;
    const Block& block = source.block;
    blocks.read(rank, source.block);
    if (block.through_slots) {
      rounds_ = std::max<size_t>(rounds_, (block.longest + cell_bytes_ - 1) / cell_bytes_);
    } else {
      in_place_ = true;
    }
    form_ = form_with(block, form_);
  };
  if (call_.kind == Kind::kBroadcast) return add(call_.root);
  sources_.reserve(board_.size());
  for (int rank = 0; rank < board_.size(); ++rank) add(rank);
}

void Pull::place_sources() {
  placed_ = true;
  if (call_.kind == Kind::kReduceScatter) {
    operands_.resize(sources_.size());
    return;  // in the order of ranks
  }
  if (call_.kind == Kind::kBroadcast) {
    sources_[0].to = static_cast<std::byte*>(call_.out);
  } else {
    operation_.counts.clear();
    for (const Source& source : sources_) operation_.counts.push_back(static_cast<int64_t>(source.block.rows));
    std::byte* to = place_output();
    for (Source& source : sources_) {
      source.to = to;
      to += source.block.bytes;
      if (source.rank == board_.rank() && call_.skip_own) source.taken = source.block.bytes;
    }
  }
  // Peers are taken in the order of their distance, so that no rank is everybody's first.
  if (sources_.size() > 1) std::rotate(sources_.begin(), sources_.begin() + board_.rank(), sources_.end());
}

std::byte* Pull::place_output() {
  uint64_t bytes = 0;
  const Source* most = &sources_[0];
  for (const Source& source : sources_) {
    bytes += source.block.bytes;
    if (source.block.bytes > most->block.bytes) most = &source;
  }
  try {
    return operation_.place_output(bytes);
  } catch (const std::bad_alloc&) {
    throw TransportError("no memory for a result of " + std::to_string(bytes) + " bytes, of which " +
                         board_.window().rank_name(most->rank) + " brings " + std::to_string(most->block.bytes) +
                         " in " + std::to_string(most->block.rows) + " rows");
  }
}

bool Pull::poll(bool& moved) {
  while (round_ < rounds_) {
    if (!board_.complete(ticket_)) return false;
    moved = true;
    if (!placed_) place_sources();
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
  if (!source.block.in_cell) return source.block.at + source.taken;
  const size_t cell = mine_.blocks() > 1 ? static_cast<size_t>(board_.window().local_rank()) : 0;
  return slots_.cells(source.rank, ticket_) + cell * cell_bytes_ + (source.taken - round_ * cell_bytes_);
}

// Takes what this round brings, at most kPieceBytes; true when that was all.
bool Pull::take() { return operands_.empty() ? copy_some() : reduce_some(); }

bool Pull::copy_some() {
  uint64_t room = kPieceBytes;
  for (; next_ < sources_.size(); ++next_) {
    Source& source = sources_[next_];
    const Block& block = source.block;
    if (source.taken >= round_end(block.bytes)) continue;
    const uint64_t bytes = std::min(room, round_end(block.bytes) - source.taken);
    if (block.foreign != 0) {
      slots_.read_peer(source.rank, source.to + source.taken, block.foreign + source.taken, bytes);
    } else {
      copy_bytes(source.to + source.taken, piece(source), bytes);
      if (block.in_cell && slots_.has_one_reader(call_.kind)) PullSlots::take_over(piece(source), bytes);
    }
    source.taken += bytes;
    room -= bytes;
    if (source.taken < round_end(block.bytes)) return false;
  }
  next_ = 0;
  return true;
}

bool Pull::reduce_some() {
  const Request& r = operation_.request;
  const uint64_t end = round_end(sources_[0].block.bytes), taken = sources_[0].taken;
  const uint64_t bytes = std::min<uint64_t>(kPieceBytes, end - taken);
  results_.assign(1, static_cast<std::byte*>(r.out) + taken);
  for (size_t i = 0; i < sources_.size(); ++i) {
    operands_[i] = piece(sources_[i]);
    if (sources_[i].block.in_cell) results_.push_back(const_cast<void*>(operands_[i]));  // takes the lines over
    sources_[i].taken += bytes;
  }
  kernels::reduce_n_to_n(results_, operands_, bytes / dtype_bytes(r.dtype), r.dtype, r.op,
                         final_scale(r.op, r.postscale, board_.size()));
  return taken + bytes == end;
}

}  // namespace dcoll
