#include "engine/board/agreement.h"

#include <cstring>

#include "base/error.h"

namespace dcoll {

Board::Board(Window& window)
    : window_(window), rank_(window.local_rank()), arena_bytes_(window.arena_bytes()), tree_(window) {
  for (int rank = 0; rank < window.local_size(); ++rank) {
    bases_.push_back(window.base(rank));
    entries_.push_back(&window.board(rank));
  }
}

void Board::throw_damaged(int rank, const std::string& what) const {
  throw TransportError(window_.rank_name(rank) + what +
                       ": its shared memory is damaged. Probably something in that process wrote where it must not; "
                       "look for out-of-bounds writes there, or run all ranks with the same dcoll version");
}

void Board::throw_outside(int rank, uint64_t offset, uint64_t bytes) const {
  throw_damaged(rank, " posted " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset) +
                          " of its memory, which has " + std::to_string(arena_bytes_) + " bytes");
}

void Board::throw_ahead(int rank, uint64_t made, uint64_t ticket) const {
  throw_damaged(rank, " tells of post " + std::to_string(made) + " where " + std::to_string(ticket) +
                          " is the last that can have been made");
}

uint64_t Board::post(const BoardEntry::Post& post) {
  const uint64_t ticket = ++ticket_;
  BoardEntry::Record& mine = record(rank_, ticket);
  mine.post = post;
  // seq_cst, as the looks of is_last_arriver: of all ranks that post and then look, the last one finds all the others.
  mine.ticket.store(ticket, std::memory_order_seq_cst);
  if (!tree_.empty()) {
    if (const int keeper = tree_.arrive(ticket); keeper >= 0) [[unlikely]]
      throw_damaged(keeper, " counts more ranks than there are where they arrive");
  } else if (is_last_arriver(ticket)) {
    window_.notify_all();
  }
  return ticket;
}

bool Board::is_last_arriver(uint64_t ticket) const {
  for (int rank = 0; rank < size(); ++rank) {
    if (record(rank, ticket).ticket.load(std::memory_order_seq_cst) < ticket) return false;
  }
  return true;
}

bool Board::complete(uint64_t ticket) const {
  if (!tree_.empty()) {
    const uint64_t released = tree_.released();
    if (released > ticket) [[unlikely]]
      throw_ahead(tree_.keeper(), released, ticket);
    return released == ticket;
  }
  int rank = 0;
  while (rank < size() && has_made(rank, ticket)) ++rank;
  return rank == size();
}

bool Board::fingerprints_equal(uint64_t ticket) const {
  if (!tree_.empty()) return tree_.outcome(ticket).least == tree_.outcome(ticket).greatest;
  for (int rank = 1; rank < size(); ++rank) {
    if (record(rank, ticket).post.fingerprint != record(0, ticket).post.fingerprint) return false;
  }
  return true;
}

int Board::count_mapped(uint64_t ticket) const {
  if (!tree_.empty()) {
    const uint64_t all = read_once(tree_.outcome(ticket).mapped);
    if (all > entries_.size()) [[unlikely]]
      throw_damaged(tree_.keeper(), " counts " + std::to_string(all) + " ranks of " + std::to_string(size()));
    return static_cast<int>(all);
  }
  int mapped = 0;
  for (int rank = 0; rank < size(); ++rank) mapped += record(rank, ticket).post.mapped();
  return mapped;
}

bool Board::all_say_yes(uint64_t ticket) const {
  int rank = 0;
  while (rank < size() && at(rank, ticket).value == 1) ++rank;
  return rank == size();
}

void Board::fetch_next_record() {
  BoardEntry::Record& next = record(rank_, next_ticket());
#if defined(__x86_64__)
  asm volatile("prefetchw %0" ::"m"(next.ticket));  // without -mprfchw, __builtin_prefetch fetches for reading only
#else
  __builtin_prefetch(&next, 1);
#endif
}

bool BoardWait::poll(bool& moved) {
  if (board_.has_tree()) {
    if (next_ == 0 && board_.complete(ticket_)) {
      next_ = board_.size();
      moved = true;
    }
  } else {
    for (; next_ < board_.size() && board_.has_made(next_, ticket_); ++next_) moved = true;
  }
  return next_ == board_.size();
}

void BoardWait::waiting_for(std::vector<int>& ranks) const {
  for (int rank = next_; rank < board_.size(); ++rank) {
    if (!board_.seen(rank, ticket_)) ranks.push_back(rank);
  }
}

Dissemination::Dissemination(Messages& transport, uint64_t fingerprint, std::span<const std::byte> operand)
    : transport_(transport),
      seen_{fingerprint, fingerprint},
      bytes_(operand.size()),
      operands_(operand.size() * static_cast<size_t>(transport.size())) {
  if (bytes_ > 0) std::memcpy(operands_.data(), operand.data(), bytes_);
}

int Dissemination::peer(int sign) const {
  const int size = transport_.size();
  return ((transport_.rank() + sign * distance_) % size + size) % size;
}

size_t Dissemination::passed_on() const {
  return static_cast<size_t>(std::min(distance_, transport_.size() - distance_)) * bytes_;
}

bool Dissemination::tell() {
  const size_t riding = equal() ? passed_on() : 0;
  std::byte* room = transport_.acquire_send(peer(+1), kControlChannel, sizeof seen_ + riding);
  if (room == nullptr) return false;
  std::memcpy(room, &seen_, sizeof seen_);
  if (riding > 0) std::memcpy(room + sizeof seen_, operands_.data(), riding);
  transport_.commit_send(peer(+1), kControlChannel);
  return true;
}

bool Dissemination::hear() {
  const std::byte* message = transport_.front(peer(-1), kControlChannel);
  if (message == nullptr) return false;
  const size_t length = transport_.front_bytes(peer(-1), kControlChannel);
  if (length < sizeof seen_) {
    throw TransportError("rank " + std::to_string(peer(-1)) + " sent " + std::to_string(length) +
                         " bytes where a handshake of at least " + std::to_string(sizeof seen_) +
                         " was expected. Run the same dcoll version on every rank");
  }
  FingerprintRange theirs;
  std::memcpy(&theirs, message, sizeof theirs);
  seen_.include(theirs);
  if (equal() && bytes_ > 0) {
    const size_t riding = passed_on();
    if (length != sizeof seen_ + riding) {
      throw TransportError("rank " + std::to_string(peer(-1)) + " sent " + std::to_string(length - sizeof seen_) +
                           " bytes of operands with its handshake where " + std::to_string(riding) +
                           " were expected. Run the same dcoll version with the same DCOLL_* settings on every rank");
    }
    std::memcpy(operands_.data() + static_cast<size_t>(distance_) * bytes_, message + sizeof seen_, riding);
  }
  transport_.pop(peer(-1), kControlChannel);
  return true;
}

bool Dissemination::poll(bool& moved) {
  while (distance_ < transport_.size()) {
    if (!posted_) {
      posted_ = transport_.post_recv_up_to(peer(-1), kControlChannel, transport_.max_message_bytes());
    }
    if (!told_) {
      if (!tell()) return false;
      told_ = moved = true;
    }
    if (!posted_ || !hear()) return false;
    distance_ *= 2;
    told_ = posted_ = false;
    moved = true;
  }
  return true;
}

const std::byte* Dissemination::operand(int rank) const {
  const int size = transport_.size();
  return operands_.data() + static_cast<size_t>((transport_.rank() - rank + size) % size) * bytes_;
}

void Dissemination::waiting_for(std::vector<int>& ranks) const {
  if (distance_ < transport_.size()) ranks.push_back(told_ ? peer(-1) : peer(+1));
}

}  // namespace dcoll
