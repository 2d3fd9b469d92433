// The handshake every collective begins with: all ranks show a fingerprint of what they called, and nothing is moved
// before all were seen to be equal. So a mismatch is found before it can do harm, and the job can go on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/board/arrival_tree.h"
#include "engine/core/task.h"
#include "plan/agreement.h"
#include "transport/transport.h"
#include "transport/window.h"

namespace dcoll {

// The board of a node as one rank uses it: numbered posts, the same numbers on every rank because every rank makes the
// same sequence of them. Post t may be overwritten by post t+2: a rank that makes post t+2 has seen all ranks make t+1,
// and a rank makes t+1 only after it has read everything of t.
class Board {
 public:
  static constexpr size_t kInlineBytes = BoardEntry::Record::kInlineBytes;

  explicit Board(Window& window);

  // Publishes this rank's next post. Everything this rank wrote before is visible to a rank that has seen the post
  // (release store). Returns its number. The peers are woken by the post that completes the ticket and by no other:
  // with p ranks asleep, p-1 wake-ups instead of p(p-1). So a post can be slept for only until everybody has made it.
  uint64_t post(const BoardEntry::Post& post);
  // Acquire load: what `rank` wrote before its post `ticket` is visible after this returned true.
  bool seen(int rank, uint64_t ticket) const {
    return record(rank, ticket).ticket.load(std::memory_order_acquire) >= ticket;
  }
  uint64_t next_ticket() const { return ticket_ + 1; }
  // A copy, each word of it read once.
  BoardEntry::Post at(int rank, uint64_t ticket) const { return record(rank, ticket).post.read(); }

  // The way into a peer's memory: where [offset, offset + bytes) of its arena lies here. Throws TransportError, which
  // names the peer, unless all of that is arena.
  std::byte* place(int rank, uint64_t offset, uint64_t bytes) const {
    if (offset > arena_bytes_ || bytes > arena_bytes_ - offset) [[unlikely]]
      throw_outside(rank, offset, bytes);
    return bases_[rank] + offset;
  }
  // Of words that `rank` posted and cannot have meant.
  [[noreturn]] void throw_damaged(int rank, const std::string& what) const;

  // Whether every rank has made post `ticket`, the last one that this rank has made; acquires what all wrote before.
  bool complete(uint64_t ticket) const;
  // Whether `rank` has. A post that cannot have been made yet is an error.
  bool has_made(int rank, uint64_t ticket) const {
    const uint64_t made = record(rank, ticket).ticket.load(std::memory_order_acquire);
    if (made > ticket) [[unlikely]]
      throw_ahead(rank, made, ticket);
    return made == ticket;
  }
  // Of a complete post: whether all showed the same fingerprint, and how many ranks have both offsets.
  bool fingerprints_equal(uint64_t ticket) const;
  int count_mapped(uint64_t ticket) const;
  // Of one whose `value` is 1 for yes, 0 for no.
  bool all_say_yes(uint64_t ticket) const;

  // kInlineBytes that travel with a post: this rank's are written before the post, the peers' read once it was seen.
  std::byte* next_inline_data() { return record(rank_, next_ticket()).inline_data; }
  const std::byte* inline_data(int rank, uint64_t ticket) const { return record(rank, ticket).inline_data; }

  // Called once everybody has made the last post: has the record of the next one brought to this core for writing, so
  // that the peers' copies of it are invalidated while the caller does something else. On cores that share no cache
  // this takes a sixth off a barrier.
  void fetch_next_record();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(entries_.size()); }
  bool has_tree() const { return !tree_.empty(); }
  Window& window() { return window_; }

 private:
  BoardEntry::Record& record(int rank, uint64_t ticket) const { return entries_[rank]->record[ticket % 2]; }
  bool is_last_arriver(uint64_t ticket) const;
  [[noreturn]] void throw_outside(int rank, uint64_t offset, uint64_t bytes) const;
  [[noreturn]] void throw_ahead(int rank, uint64_t made, uint64_t ticket) const;

  Window& window_;
  const int rank_;
  const uint64_t arena_bytes_;
  std::vector<std::byte*> bases_;     // per rank: its arena
  std::vector<BoardEntry*> entries_;  // per rank
  uint64_t ticket_ = 0;
  ArrivalTree tree_;  // empty for few ranks, where everybody looks at every record
};

// Until every rank of the board has made post `ticket`: a barrier.
class BoardWait final : public Pollable {
 public:
  BoardWait(Board& board, uint64_t ticket) : board_(board), ticket_(ticket) {}
  bool poll(bool& moved) override;
  void waiting_for(std::vector<int>& ranks) const override;

 private:
  Board& board_;
  uint64_t ticket_;
  int next_ = 0;  // ranks before this one have posted
};

// The least and the greatest of the fingerprints that some ranks showed.
struct FingerprintRange {
  uint64_t least, greatest;

  void include(const FingerprintRange& other) {
    least = std::min(least, other.least);
    greatest = std::max(greatest, other.greatest);
  }
  bool equal() const { return least == greatest; }
};

// The same by messages, for ranks that share no memory: the dissemination barrier of Hensgen, Finkel and Manber ("Two
// algorithms for barrier synchronization", 1988), carrying the least and the greatest fingerprint seen. ceil(log2 n)
// rounds; in round k rank r tells r + 2^k. Min and max are idempotent, so n need not be a power of two.
//
// Small operands ride along: in round k a rank passes on all the operands it holds, so that at the end everybody has
// everybody's (J. Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing
// systems", 1997, section 3). What may is plan::rides_on_agreement(). Lengths may differ where the calls do, so every
// message says how long it is; once a rank has seen two fingerprints it passes on no operands any more.
class Dissemination final : public Pollable {
 public:
  // `operand` has one length on all ranks whose fingerprints are equal. It must live until poll() returned true.
  Dissemination(Messages& transport, uint64_t fingerprint, std::span<const std::byte> operand = {});
  // For several ranks.
  Dissemination(Messages& transport, const FingerprintRange& own) : transport_(transport), seen_(own), bytes_(0) {}

  bool poll(bool& moved) override;
  void waiting_for(std::vector<int>& ranks) const override;
  bool equal() const { return seen_.equal(); }
  // Of any rank, when all were equal.
  const std::byte* operand(int rank) const;

 private:
  static_assert(sizeof(FingerprintRange) == plan::kAgreementHeaderBytes);
  int peer(int sign) const;
  // In this round a rank passes on this much: its own operand and those of the ranks just behind it.
  size_t passed_on() const;
  bool tell();
  bool hear();

  Messages& transport_;
  FingerprintRange seen_;
  const size_t bytes_;               // of one operand
  std::vector<std::byte> operands_;  // of this rank, the one behind it, and so on
  int distance_ = 1;                 // 2^k
  bool told_ = false;
  bool posted_ = false;
};

}  // namespace dcoll
